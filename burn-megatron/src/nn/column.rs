//! A linear layer whose output columns are split over the tensor axis.

use burn::module::{Module, Param};
use burn::tensor::Tensor;

use super::fp8::{Fp8Layer, SplitOperands};
use super::linear::{InputLayout, Weight, linear, linear_fp8};
use super::{BuildError, Init, ModelBuilder, ParameterSpec, Placement, Section, anchored_value};
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

/// A part of the output features that is split on its own, such as the queries of a QKV projection.
#[derive(Clone, Debug)]
pub struct OutputSection {
    /// The name of the units in errors, such as "heads".
    pub unit: &'static str,
    /// The number of units; each rank has whole ones.
    pub units: usize,
    /// Features per unit.
    pub width: usize,
    /// Whether adjacent ranks may hold replicas of one unit if there are fewer units than ranks.
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

    /// A layer whose output has several sections, each split on its own.
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

    /// Sets whether the layer has a bias (default: true).
    pub fn with_bias(mut self, bias: bool) -> Self {
        self.bias = bias;
        self
    }

    /// Sets whether the output is all-gathered (default: false, each rank returns its part).
    pub fn with_gather_output(mut self, gather: bool) -> Self {
        self.gather_output = gather;
        self
    }

    /// Sets whether the input is split along the sequence (default: false).
    pub fn with_sequence_parallel(mut self, sequence_parallel: bool) -> Self {
        self.sequence_parallel = sequence_parallel;
        self
    }

    /// Builds this rank's part of the layer.
    ///
    /// # Errors
    ///
    /// [`BuildError`] if a section cannot be split over the tensor axis, if an output of several sections is
    /// to be gathered (its parts would be out of order), or if an 8-bit layer with this path exists.
    pub fn init(&self, builder: &ModelBuilder) -> Result<ColumnParallelLinear, BuildError> {
        let ranks = builder.place().size;
        let sections = self.sections.iter().map(|section| section.split(ranks));
        let sections = sections.collect::<Result<Vec<_>, _>>()?;
        if self.gather_output && sections.len() > 1 {
            return Err(builder.error("an output of several sections cannot be gathered"));
        }
        let output = sections.iter().map(|section| section.size).sum();
        let split_along = |dim| Placement::Split {
            dim,
            sections: sections.clone(),
        };

        let weight = ParameterSpec::new([self.input, output], self.init)
            .with_placement(Axis::Tensor, split_along(1));
        let bias = ParameterSpec::new([output], Init::Constant(0.0))
            .with_placement(Axis::Tensor, split_along(0));
        Ok(ColumnParallelLinear {
            weight: builder.parameter("weight", weight),
            bias: self.bias.then(|| builder.parameter("bias", bias)),
            comm: builder.groups().tensor().clone(),
            gather_output: self.gather_output,
            sequence_parallel: self.sequence_parallel,
            fused: builder.is_fused(Operation::Linear),
            fp8: builder.fp8_layer(SplitOperands {
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
/// The input gradient is all-reduced while the weight gradient is computed. On one rank this is the plain
/// linear layer.
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
    /// `[batch, seq, in]` to `[batch, seq, out / tensor]`, or to `[batch, seq, out]` if gathered.
    ///
    /// Under sequence parallelism the input is `[batch, seq / tensor, in]`.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let bias = self.bias.as_ref().map(|bias| anchored_value(bias, &x));
        let y = self.product(x, bias);
        if self.gather_output {
            collective::gather(y, 2, &self.comm)
        } else {
            y
        }
    }

    /// This rank's part of the output before the bias, and its part of the bias, for an operation
    /// that adds it.
    ///
    /// # Panics
    ///
    /// If the output is gathered.
    pub fn forward_without_bias(&self, x: Tensor<3>) -> (Tensor<3>, Option<Tensor<1>>) {
        assert!(
            !self.gather_output,
            "forward_without_bias of a layer with gather_output: expected gather_output = false"
        );
        let y = self.product(x, None);
        let bias = self.bias.as_ref().map(|bias| anchored_value(bias, &y));
        (y, bias)
    }

    fn product(&self, x: Tensor<3>, bias: Option<Tensor<1>>) -> Tensor<3> {
        let comm = self.comm.clone();
        let input = match (comm.size(), self.sequence_parallel) {
            (1, _) => InputLayout::Local,
            (_, false) => InputLayout::Replicated(comm),
            (_, true) => InputLayout::SplitSequence(comm),
        };
        match &self.fp8 {
            Some(layer) => {
                let weight = Weight::unfetched(&self.weight, &x);
                linear_fp8(x, weight, bias, input, layer)
            }
            None => {
                let weight = Weight::of(&self.weight, &x);
                linear(x, weight, bias, input, self.fused)
            }
        }
    }
}
