//! A linear layer whose input features are split over the tensor axis.

use burn::module::{Module, Param};
use burn::tensor::Tensor;

use super::fp8::{Fp8Layer, Split};
use super::linear::{InputLies, SEQUENCE_DIM, Weight, linear, linear_in_8_bits};
use super::{BuildError, Init, ParameterSpec, Placement, Scope, value_at};
use crate::choice::Operation;
use crate::collective::{self, Comm};
use crate::mesh::{Axis, split_evenly};

/// Configuration of a [`RowParallelLinear`].
#[derive(Clone, Debug)]
pub struct RowParallelLinearConfig {
    input: usize,
    output: usize,
    init: Init,
    bias: bool,
    input_is_split: bool,
    sequence_parallel: bool,
}

impl RowParallelLinearConfig {
    /// A layer from `input` features, of which each rank brings its part, to `output` features.
    pub fn new(input: usize, output: usize) -> Self {
        let init = Init::Normal(0.02);
        Self {
            input,
            output,
            init,
            bias: true,
            input_is_split: true,
            sequence_parallel: false,
        }
    }

    /// Sets the initial values of the weight; those of the bias are 0.
    pub fn with_init(mut self, init: Init) -> Self {
        self.init = init;
        self
    }

    /// Sets whether there is a bias (there is).
    pub fn with_bias(mut self, bias: bool) -> Self {
        self.bias = bias;
        self
    }

    /// Sets whether the input is this rank's features (it is), or all of them on every rank.
    pub fn with_input_is_split(mut self, input_is_split: bool) -> Self {
        self.input_is_split = input_is_split;
        self
    }

    /// Sets whether the output is split along the sequence (it is not).
    pub fn with_sequence_parallel(mut self, sequence_parallel: bool) -> Self {
        self.sequence_parallel = sequence_parallel;
        self
    }

    /// Builds this rank's part of the layer.
    ///
    /// # Errors
    ///
    /// [`BuildError`] when the input features cannot be split over the tensor axis, and for an 8-bit layer
    /// whose path there is already.
    pub fn init(&self, scope: &Scope) -> Result<RowParallelLinear, BuildError> {
        let ranks = scope.place().size;
        split_evenly("input features", self.input, Axis::Tensor, ranks)?;
        let weight = ParameterSpec::new([self.input, self.output], self.init)
            .placed(Placement::split(0, self.input, ranks));
        // Added after the reduction, so to a part of the sequence where that is split.
        let bias = ParameterSpec::new([self.output], Init::Constant(0.0))
            .with_partial_gradient(self.sequence_parallel);
        Ok(RowParallelLinear {
            weight: scope.parameter("weight", weight),
            bias: self.bias.then(|| scope.parameter("bias", bias)),
            comm: scope.groups().tensor().clone(),
            input_is_split: self.input_is_split,
            sequence_parallel: self.sequence_parallel,
            fused: scope.is_fused(Operation::Linear),
            fp8: scope.fp8_layer(Split {
                input: true,
                gradient: false,
            })?,
        })
    }
}

/// `y = x W + b` with the rows of `W` split over the tensor axis; `b` is added after the sum.
///
/// On one rank this is the plain linear layer.
#[derive(Module, Debug)]
pub struct RowParallelLinear {
    /// This rank's rows: `[in / tensor, out]`.
    pub weight: Param<Tensor<2>>,
    /// The same on every rank: `[out]`.
    pub bias: Option<Param<Tensor<1>>>,
    fp8: Option<Fp8Layer>,
    #[module(skip)]
    comm: Comm,
    #[module(skip)]
    input_is_split: bool,
    #[module(skip)]
    sequence_parallel: bool,
    #[module(skip)]
    fused: bool,
}

impl RowParallelLinear {
    /// `[batch, seq, in / tensor]` to `[batch, seq, out]`, or to `[batch, seq / tensor, out]`
    /// under sequence parallelism.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        match self.forward_without_bias(x) {
            (y, Some(bias)) => y + bias.unsqueeze(),
            (y, None) => y,
        }
    }

    /// The output before the bias, and the bias, for an operation that adds it itself.
    pub fn forward_without_bias(&self, x: Tensor<3>) -> (Tensor<3>, Option<Tensor<1>>) {
        let x = match self.input_is_split {
            true => x,
            false => collective::split(x, 2, &self.comm),
        };
        let partial = match &self.fp8 {
            Some(layer) => {
                let weight = Weight::asked_for(&self.weight, &x);
                linear_in_8_bits(x, weight, None, InputLies::Local, layer)
            }
            None => {
                let weight = Weight::of(&self.weight, &x);
                linear(x, weight, None, InputLies::Local, self.fused)
            }
        };
        let y = match self.sequence_parallel {
            true => collective::reduce_scatter_sequence(partial, SEQUENCE_DIM, &self.comm),
            false => collective::reduce(partial, &self.comm),
        };
        let bias = self.bias.as_ref().map(|bias| value_at(bias, &y));
        (y, bias)
    }
}
