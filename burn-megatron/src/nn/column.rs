//! A linear layer whose output columns are split over the tensor axis.

use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::Tensor;
use burn_megatron_kernels::gradient::Parameter;

use super::arithmetic::LinearKernels;
use super::fp8::{Fp8Layer, SplitOperands};
use super::gelu_epilogue::GeluInput;
use super::hook::fused_parameter;
use super::input_layout::InputLayout;
use super::linear::{LinearOperands, linear};
use super::lora::{LoraAdapters, LoraTarget, column_adapters};
use super::{
    Bias, BuildError, Init, ModelBuilder, Norm, ParameterSpec, Placement, Residual, Section,
};
use crate::collective::{self, Comm};
use crate::mesh::{Axis, split_evenly};

/// Configuration of a [`ColumnParallelLinear`].
#[derive(Config, Debug)]
pub struct ColumnParallelLinearConfig {
    /// The number of input features.
    pub input: usize,
    /// The number of output features, over all ranks.
    pub output: usize,
    /// The sections of the output features. Each section is split over the ranks separately. By default the output is
    /// one section.
    #[config(default = "vec![]")]
    pub sections: Vec<OutputSection>,
    /// The initializer of the weight. The bias is initialized to 0.
    #[config(default = "Init::Normal(0.02)")]
    pub init: Init,
    /// Whether the layer has a bias.
    #[config(default = true)]
    pub bias: bool,
    /// Whether the output is all-gathered over the tensor axis. Otherwise each rank returns its part of the output.
    #[config(default = false)]
    pub gather_output: bool,
    /// The LoRA target of each section. Empty if the layer cannot have adapters.
    #[config(default = "vec![]")]
    pub targets: Vec<LoraTarget>,
}

/// A section of the output features that is split over the ranks separately, such as the queries of a QKV projection.
///
/// ```
/// use burn::tensor::Device;
/// use burn_megatron::nn::OutputSection;
/// use burn_megatron::prelude::*;
///
/// // Four query heads, and one head of keys and values that both ranks hold.
/// let shared = || OutputSection::new("groups".into(), 1, 2).with_shared(true);
/// let sections = vec![OutputSection::new("heads".into(), 4, 2), shared(), shared()];
/// let config = ColumnParallelLinearConfig::new(8, 12).with_sections(sections);
/// let layout = ParallelConfig::new().with_tensor(2);
/// let shapes = World::threads(2)?.run(|rank| {
///     let groups = ParallelContext::new(&layout, &rank)?;
///     let layer = config.init(&ModelBuilder::new(&groups, &Device::flex()))?;
///     Ok::<_, AnyError>(layer.weight.val().dims())
/// })?;
/// assert_eq!(shapes, [[8, 4 + 2 + 2]; 2]);
/// # Ok::<(), AnyError>(())
/// ```
#[derive(Config, Debug)]
pub struct OutputSection {
    /// The name of the units in error messages, such as "heads".
    pub unit: String,
    /// The number of units, such as heads. A unit is never split between ranks.
    pub units: usize,
    /// The number of features per unit.
    pub width: usize,
    /// Whether adjacent ranks may hold replicas of a unit if there are fewer units than ranks.
    #[config(default = false)]
    pub shared: bool,
}

impl ColumnParallelLinearConfig {
    /// Builds this rank's part of the layer.
    ///
    /// # Errors
    ///
    /// [`BuildError`] in these cases:
    ///
    /// - a section cannot be split over the tensor axis;
    /// - the sizes of the sections do not add up to `output`;
    /// - `gather_output` is set and there are several sections, because the gathered features would be out of order;
    /// - an FP8 layer with this path has already been built.
    pub fn init(&self, builder: &ModelBuilder) -> Result<ColumnParallelLinear, BuildError> {
        let ranks = builder.place().size;
        let whole = [OutputSection::new("output features".into(), self.output, 1)];
        let sections = match &self.sections[..] {
            [] => &whole[..],
            sections => sections,
        };
        let sections = sections.iter().map(|section| section.split(ranks));
        let sections = sections.collect::<Result<Vec<_>, _>>()?;
        if self.gather_output && sections.len() > 1 {
            return Err(builder.error("an output of several sections cannot be gathered"));
        }
        let output = self.output;
        let size: usize = sections.iter().map(|section| section.size).sum();
        if output != size {
            return Err(builder.error(format!(
                "the sections have {size} features in all: expected the {output} of the output"
            )));
        }
        let split_along = |dim| Placement::Split {
            dim,
            sections: sections.clone(),
        };

        let comm = builder.groups().tensor().clone();
        let whole = InputLayout::whole(&comm, builder.sequence_parallel());
        let targets: Vec<_> = self.targets.iter().copied().zip(sections.clone()).collect();
        let lora = column_adapters(builder, self.input, &targets, whole.clone())?;
        let weight = ParameterSpec::new([self.input, output], self.init)
            .with_placement(Axis::Tensor, split_along(1));
        let bias = ParameterSpec::new([output], Init::Constant(0.0))
            .with_placement(Axis::Tensor, split_along(0));
        let fp8 = builder.fp8_layer(SplitOperands {
            input: false,
            gradient: true,
        })?;
        let input = match builder.overlapped_group(fp8.as_ref())? {
            Some(group) => InputLayout::SplitSequenceInChunks(group),
            None => whole,
        };
        Ok(ColumnParallelLinear {
            weight: builder.parameter("weight", weight),
            bias: self.bias.then(|| builder.parameter("bias", bias)),
            lora,
            comm,
            input,
            gather_output: self.gather_output,
            kernels: builder.linear_kernels(),
            fp8,
        })
    }
}

impl OutputSection {
    /// Splits the section over `ranks` ranks.
    pub(super) fn split(&self, ranks: usize) -> Result<Section, BuildError> {
        let size = self.units * self.width;
        if self.shared && self.units > 0 && ranks.is_multiple_of(self.units) {
            return Ok(Section {
                size,
                parts: self.units,
            });
        }
        split_evenly(&self.unit, self.units, Axis::Tensor, ranks)?;
        Ok(Section { size, parts: ranks })
    }
}

/// A linear layer `y = x W + b` with the columns of `W` split over the tensor axis.
///
/// In the backward pass, the all-reduce of the input gradient overlaps with the computation of the weight gradient. On
/// one rank this is an ordinary linear layer.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_megatron::prelude::*;
///
/// let config = ColumnParallelLinearConfig::new(8, 6).with_gather_output(true);
/// let layout = ParallelConfig::new().with_tensor(2);
/// let shapes = World::threads(2)?.run(|rank| {
///     let groups = ParallelContext::new(&layout, &rank)?;
///     let layer = config.init(&ModelBuilder::new(&groups, &Device::flex()))?;
///     let y = layer.forward(Tensor::ones([1, 4, 8], &Device::flex()));
///     Ok::<_, AnyError>((layer.weight.val().dims(), y.dims()))
/// })?;
/// assert_eq!(shapes, [([8, 3], [1, 4, 6]); 2]);
/// # Ok::<(), AnyError>(())
/// ```
#[derive(Module, Debug)]
pub struct ColumnParallelLinear {
    /// This rank's columns of the weight: `[in, out / tensor]`.
    pub weight: Param<Tensor<2>>,
    /// This rank's part of the bias: `[out / tensor]`.
    pub bias: Option<Param<Tensor<1>>>,
    /// The LoRA adapters of the sections.
    pub lora: Option<LoraAdapters>,
    fp8: Option<Fp8Layer>,
    #[module(skip)]
    comm: Comm,
    #[module(skip)]
    gather_output: bool,
    #[module(skip)]
    input: InputLayout,
    #[module(skip)]
    kernels: LinearKernels,
}

impl ColumnParallelLinear {
    /// Applies the layer to `[batch, seq, in]`. Returns `[batch, seq, out / tensor]`, or `[batch, seq, out]` with
    /// `gather_output`.
    ///
    /// Under sequence parallelism the input is `[batch, seq / tensor, in]`.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let bias = self.fused_bias(&x);
        let y = self.product(x, bias);
        if self.gather_output {
            collective::gather(y, 2, &self.comm)
        } else {
            y
        }
    }

    /// Returns this rank's part of the output without the bias, and this rank's part of the bias. The caller adds the
    /// bias in a fused operation.
    ///
    /// # Panics
    ///
    /// If the layer has `gather_output`.
    pub fn forward_without_bias(&self, x: Tensor<3>) -> (Tensor<3>, Option<Bias>) {
        self.expect_split();
        let y = self.product(x, None);
        let bias = self.bias_of(&y);
        (y, bias)
    }

    /// Returns this rank's part of the output, including the bias, together with GELU (tanh approximation) of this
    /// part.
    pub fn forward_to_gelu(&self, x: Tensor<3>) -> GeluInput {
        let bias = self.fused_bias(&x);
        GeluInput::of(x, self.operands(bias))
    }

    /// Returns the property that prevents fusing GELU into the epilogue of the matmul, or `None` if this is possible.
    pub(super) fn epilogue_obstacle(&self) -> Option<&'static str> {
        let operands = self.operands(None);
        operands.epilogue_obstacle(self.lora.is_some())
    }

    /// Applies `norm` to a residual stream, and [`forward`](Self::forward) to the result. Also returns the summed
    /// residual stream.
    ///
    /// # Panics
    ///
    /// If the layer has `gather_output`.
    pub(super) fn forward_normalized(&self, norm: &Norm, x: Residual) -> (Tensor<3>, Tensor<3>) {
        self.product_of_norm(norm, x, true)
    }

    /// Applies `norm` to a residual stream, and [`forward_without_bias`](Self::forward_without_bias) to the result.
    /// Also returns the summed residual stream.
    pub(super) fn forward_normalized_without_bias(
        &self,
        norm: &Norm,
        x: Residual,
    ) -> ((Tensor<3>, Option<Bias>), Tensor<3>) {
        let (y, stream) = self.product_of_norm(norm, x, false);
        let bias = self.bias_of(&y);
        ((y, bias), stream)
    }

    /// Returns the matmul of a normalized residual stream, with or without the bias, and the summed residual stream.
    fn product_of_norm(&self, norm: &Norm, x: Residual, has_bias: bool) -> (Tensor<3>, Tensor<3>) {
        self.expect_split();
        let bias_for = |x: &Tensor<3>| has_bias.then(|| self.fused_bias(x)).flatten();
        if !norm.is_recomputed() || self.lora.is_some() {
            let (normal, stream) = norm.forward_add(x);
            let bias = bias_for(&normal);
            return (self.product(normal, bias), stream);
        }
        norm.product(x, |anchor| self.operands(bias_for(anchor)))
    }

    /// Applies the layer to an input `[batch, seq, in]` that has already been gathered over the tensor ranks. Returns
    /// `[batch, seq, out / tensor]`. The caller sums the input gradient over the ranks.
    pub(super) fn forward_entered(&self, x: Tensor<3>) -> Tensor<3> {
        let operands = LinearOperands {
            input: InputLayout::Local,
            ..self.operands(self.fused_bias(&x))
        };
        linear(x, operands)
    }

    fn product(&self, x: Tensor<3>, bias: Option<Parameter>) -> Tensor<3> {
        match &self.lora {
            None => linear(x, self.operands(bias)),
            Some(lora) => linear(x.clone(), self.operands(bias)) + lora.delta(x),
        }
    }

    fn operands(&self, bias: Option<Parameter>) -> LinearOperands<'_> {
        LinearOperands {
            bias,
            fp8: self.fp8.as_ref(),
            ..LinearOperands::new(&self.weight, self.input.clone(), self.kernels)
        }
    }

    /// Returns the bias for the matmul of `x`, which adds the bias.
    fn fused_bias(&self, x: &Tensor<3>) -> Option<Parameter> {
        self.bias.as_ref().map(|bias| fused_parameter(bias, x))
    }

    /// Returns the bias for the output `y`, to which it has not been added.
    fn bias_of(&self, y: &Tensor<3>) -> Option<Bias> {
        self.bias.as_ref().map(|bias| Bias::new(bias, y))
    }

    fn expect_split(&self) {
        assert!(
            !self.gather_output,
            "forward_without_bias of a layer with gather_output: expected gather_output = false"
        );
    }
}
