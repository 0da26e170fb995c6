//! A linear layer whose output columns are split over the tensor axis.

use burn::module::{Module, Param};
use burn::tensor::Tensor;

use super::fp8::{Fp8Layer, Split};
use super::linear::{InputLies, Weight, linear, linear_in_8_bits};
use super::{BuildError, Init, ParameterSpec, Placement, Scope, Section, value_at};
use crate::choice::Operation;
use crate::collective::{self, Comm};
use crate::mesh::{Axis, split_evenly};

/// Configuration of a [`ColumnParallelLinear`].
#[derive(Clone, Debug)]
pub struct ColumnParallelLinearConfig {
    input: usize,
    sections: Vec<OutputSection>,
    init: Init,
    bias: bool,
    gather_output: bool,
    sequence_parallel: bool,
}

/// A stretch of the output that is split on its own.
#[derive(Clone, Debug)]
pub struct OutputSection {
    /// What the units are called in errors, such as "heads".
    pub unit: &'static str,
    /// How many units there are; ranks take whole ones.
    pub units: usize,
    /// The width of one unit.
    pub width: usize,
    /// Whether neighbouring ranks may hold the same unit where there are fewer units than ranks.
    pub shared: bool,
}

impl ColumnParallelLinearConfig {
    /// A layer from `input` to `output` features, with a bias and a split output.
    pub fn new(input: usize, output: usize) -> Self {
        let output = OutputSection {
            unit: "output features",
            units: output,
            width: 1,
            shared: false,
        };
        Self::with_sections(input, vec![output])
    }

    /// A layer whose output has several sections, each of them split on its own.
    pub fn with_sections(input: usize, sections: Vec<OutputSection>) -> Self {
        let init = Init::Normal(0.02);
        Self {
            input,
            sections,
            init,
            bias: true,
            gather_output: false,
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

    /// Sets whether every rank gets the whole output (it gets its part).
    pub fn with_gather_output(mut self, gather: bool) -> Self {
        self.gather_output = gather;
        self
    }

    /// Sets whether the input is split along the sequence (it is not).
    pub fn with_sequence_parallel(mut self, sequence_parallel: bool) -> Self {
        self.sequence_parallel = sequence_parallel;
        self
    }

    /// Builds this rank's part of the layer.
    ///
    /// # Errors
    ///
    /// [`BuildError`] when a section cannot be split over the tensor axis, or when an output of
    /// several sections should be gathered (the parts would not lie in order), and for an 8-bit layer
    /// whose path there is already.
    pub fn init(&self, scope: &Scope) -> Result<ColumnParallelLinear, BuildError> {
        let ranks = scope.place().size;
        let sections = self.sections.iter().map(|section| section.split(ranks));
        let sections = sections.collect::<Result<Vec<_>, _>>()?;
        if self.gather_output && sections.len() > 1 {
            return Err(scope.error("an output of several sections cannot be gathered"));
        }
        let output = sections.iter().map(|section| section.size).sum();
        let on_dim = |dim| Placement::Split {
            dim,
            sections: sections.clone(),
        };

        let weight = ParameterSpec::new([self.input, output], self.init).placed(on_dim(1));
        let bias = ParameterSpec::new([output], Init::Constant(0.0)).placed(on_dim(0));
        Ok(ColumnParallelLinear {
            weight: scope.parameter("weight", weight),
            bias: self.bias.then(|| scope.parameter("bias", bias)),
            comm: scope.groups().tensor().clone(),
            gather_output: self.gather_output,
            sequence_parallel: self.sequence_parallel,
            fused: scope.is_fused(Operation::Linear),
            fp8: scope.fp8_layer(Split {
                input: false,
                gradient: true,
            })?,
        })
    }
}

impl OutputSection {
    fn split(&self, ranks: usize) -> Result<Section, BuildError> {
        let size = self.units * self.width;
        if self.shared && self.units > 0 && ranks.is_multiple_of(self.units) {
            return Ok(Section {
                size,
                parts: self.units,
            });
        }
        split_evenly(self.unit, self.units, Axis::Tensor, ranks)?;
        Ok(Section { size, parts: ranks })
    }
}

/// `y = x W + b` with the columns of `W` split over the tensor axis.
///
/// The gradient of the input is summed over the axis while the weight gradient is computed. On one
/// rank this is the plain linear layer.
#[derive(Module, Debug)]
pub struct ColumnParallelLinear {
    /// This rank's columns: `[in, out / tensor]`.
    pub weight: Param<Tensor<2>>,
    /// This rank's part: `[out / tensor]`.
    pub bias: Option<Param<Tensor<1>>>,
    fp8: Option<Fp8Layer>,
    #[module(skip)]
    comm: Comm,
    #[module(skip)]
    gather_output: bool,
    #[module(skip)]
    sequence_parallel: bool,
    #[module(skip)]
    fused: bool,
}

impl ColumnParallelLinear {
    /// `[batch, seq, in]` to `[batch, seq, out / tensor]`, or to all `out` features where gathered.
    ///
    /// Under sequence parallelism the input is `[batch, seq / tensor, in]`.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let bias = self.bias.as_ref().map(|bias| value_at(bias, &x));
        let y = self.product(x, bias);
        match self.gather_output {
            true => collective::gather(y, 2, &self.comm),
            false => y,
        }
    }

    /// This rank's part of the output before the bias, and its part of the bias, for an operation
    /// that adds it itself.
    ///
    /// # Panics
    ///
    /// When the output is to be gathered.
    pub fn forward_without_bias(&self, x: Tensor<3>) -> (Tensor<3>, Option<Tensor<1>>) {
        assert!(
            !self.gather_output,
            "an output without its bias cannot be gathered"
        );
        let y = self.product(x, None);
        let bias = self.bias.as_ref().map(|bias| value_at(bias, &y));
        (y, bias)
    }

    fn product(&self, x: Tensor<3>, bias: Option<Tensor<1>>) -> Tensor<3> {
        let comm = self.comm.clone();
        let input = match (comm.size(), self.sequence_parallel) {
            (1, _) => InputLies::Local,
            (_, false) => InputLies::Replicated(comm),
            (_, true) => InputLies::SplitSequence(comm),
        };
        match &self.fp8 {
            Some(layer) => {
                let weight = Weight::asked_for(&self.weight, &x);
                linear_in_8_bits(x, weight, bias, input, layer)
            }
            None => {
                let weight = Weight::of(&self.weight, &x);
                linear(x, weight, bias, input, self.fused)
            }
        }
    }
}
