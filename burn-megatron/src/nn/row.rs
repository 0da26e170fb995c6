//! A linear layer whose input features are split over the tensor axis.

use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::Tensor;
use burn_megatron_kernels::dropout::bias_dropout_add_with;

use super::arithmetic::LinearKernels;
use super::fp8::{Fp8Layer, SplitOperands};
use super::input_layout::{InputLayout, SEQUENCE_DIM};
use super::linear::{LinearOperands, linear};
use super::lora::{LoraAdapters, LoraTarget, row_adapters};
use super::tp_comm_overlap::TpCommOverlapGroup;
use super::{Bias, BuildError, Init, LinearInput, ModelBuilder, ParameterSpec, Placement};
use crate::collective::{self, Comm};
use crate::mesh::{Axis, split_evenly};

/// Configuration of a [`RowParallelLinear`].
#[derive(Config, Debug)]
pub struct RowParallelLinearConfig {
    /// The number of input features, over all ranks.
    pub input: usize,
    /// The number of output features.
    pub output: usize,
    /// The initializer of the weight. The bias is initialized to 0.
    #[config(default = "Init::Normal(0.02)")]
    pub init: Init,
    /// Whether the layer has a bias.
    #[config(default = true)]
    pub bias: bool,
    /// Whether the input is already split over the ranks. Otherwise every rank has the full input.
    #[config(default = true)]
    pub input_is_split: bool,
    /// The LoRA target of the layer. `None` if the layer cannot have an adapter.
    pub target: Option<LoraTarget>,
}

impl RowParallelLinearConfig {
    /// Builds this rank's part of the layer.
    ///
    /// # Errors
    ///
    /// [`BuildError`] if the input features cannot be split over the tensor axis, or if an FP8 layer with this path
    /// exists.
    pub fn init(&self, builder: &ModelBuilder) -> Result<RowParallelLinear, BuildError> {
        let ranks = builder.place().size;
        split_evenly("input features", self.input, Axis::Tensor, ranks)?;
        let lora = row_adapters(builder, [self.input, self.output], self.target)?;
        let weight = ParameterSpec::new([self.input, self.output], self.init)
            .with_placement(Axis::Tensor, Placement::split(0, self.input, ranks));
        // The bias is added after the reduction. Under sequence parallelism it is therefore only added to this rank's
        // part of the sequence.
        let bias = ParameterSpec::new([self.output], Init::Constant(0.0))
            .with_sum_over(builder.sequence_parallel().then_some(Axis::Tensor));
        let fp8 = builder.fp8_layer(SplitOperands {
            input: true,
            gradient: false,
        })?;
        Ok(RowParallelLinear {
            weight: builder.parameter("weight", weight),
            bias: self.bias.then(|| builder.parameter("bias", bias)),
            lora,
            comm: builder.groups().tensor().clone(),
            input_is_split: self.input_is_split,
            sequence_parallel: builder.sequence_parallel(),
            overlapped: builder.overlapped_group(fp8.as_ref())?,
            kernels: builder.linear_kernels(),
            fp8,
        })
    }
}

/// A linear layer `y = x W + b` with the rows of `W` split over the tensor axis. The outputs of the ranks are summed,
/// and `b` is added to the sum.
///
/// On one rank this is an ordinary linear layer.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_megatron::prelude::*;
///
/// let layout = ParallelConfig::new().with_tensor(2);
/// let shapes = World::threads(2)?.run(|rank| {
///     let groups = ParallelContext::new(&layout, &rank)?;
///     let builder = ModelBuilder::new(&groups, &Device::flex());
///     let layer = RowParallelLinearConfig::new(8, 6).init(&builder)?;
///     // This rank has 4 of the 8 input features.
///     let x = Tensor::<3>::ones([1, 2, 4], &Device::flex());
///     Ok::<_, AnyError>((layer.weight.val().dims(), layer.forward(x).dims()))
/// })?;
/// assert_eq!(shapes, [([4, 6], [1, 2, 6]); 2]);
/// # Ok::<(), AnyError>(())
/// ```
#[derive(Module, Debug)]
pub struct RowParallelLinear {
    /// This rank's rows of the weight: `[in / tensor, out]`.
    pub weight: Param<Tensor<2>>,
    /// The bias `[out]`, which is the same on every rank.
    pub bias: Option<Param<Tensor<1>>>,
    /// The LoRA adapter of the layer. `None` if the layer has no adapter.
    pub lora: Option<LoraAdapters>,
    fp8: Option<Fp8Layer>,
    #[module(skip)]
    comm: Comm,
    #[module(skip)]
    input_is_split: bool,
    #[module(skip)]
    sequence_parallel: bool,
    /// The tensor axis, if the output is summed in chunks.
    #[module(skip)]
    overlapped: Option<TpCommOverlapGroup>,
    #[module(skip)]
    kernels: LinearKernels,
}

impl RowParallelLinear {
    /// Applies the layer to `[batch, seq, in / tensor]`. Returns `[batch, seq, out]`, or `[batch, seq / tensor, out]`
    /// under sequence parallelism.
    pub fn forward(&self, x: impl Into<LinearInput>) -> Tensor<3> {
        self.with_bias(self.product(x))
    }

    /// Returns the property that prevents the matmul from reading the GELU output of another matmul, or `None` if this
    /// is possible.
    pub(super) fn epilogue_obstacle(&self) -> Option<&'static str> {
        let operands = self.operands(self.overlapped.clone());
        operands.epilogue_obstacle(self.lora.is_some())
    }

    /// Adds the bias to the output of the matmul.
    pub(super) fn with_bias(&self, y: Tensor<3>) -> Tensor<3> {
        let bias = self.bias_of(&y);
        match (y, bias) {
            (y, Some(bias)) if self.kernels.fused => {
                bias_dropout_add_with(y, Some(bias.into_parameter()), None, None)
            }
            (y, Some(bias)) => y + bias.into_tensor().unsqueeze(),
            (y, None) => y,
        }
    }

    /// Returns the output without the bias, and the bias. The caller adds the bias in a fused operation.
    pub fn forward_without_bias(&self, x: impl Into<LinearInput>) -> (Tensor<3>, Option<Bias>) {
        let y = self.product(x);
        let bias = self.bias_of(&y);
        (y, bias)
    }

    /// Returns the bias for the output `y`, to which it has not been added.
    pub(super) fn bias_of(&self, y: &Tensor<3>) -> Option<Bias> {
        self.bias.as_ref().map(|bias| Bias::new(bias, y))
    }

    /// Returns the output without the bias.
    pub(super) fn product(&self, x: impl Into<LinearInput>) -> Tensor<3> {
        match &self.overlapped {
            Some(group) => self.product_in(x.into(), Some(group.clone())),
            None => self.reduced(self.partial(x)),
        }
    }

    /// Returns this rank's term of the output, before the [reduction](Self::reduced). A recomputed region ends with
    /// this term, so that the collective does not run again. If the sum is computed in chunks, the result is the
    /// complete output, which the second pass does not compute again.
    pub(super) fn partial(&self, x: impl Into<LinearInput>) -> Tensor<3> {
        let group = self.overlapped.clone();
        let group = group.map(TpCommOverlapGroup::ending_region);
        self.product_in(x.into(), group)
    }

    /// Returns the output without the bias if `group` sums the output. Otherwise returns this rank's term.
    fn product_in(&self, x: LinearInput, group: Option<TpCommOverlapGroup>) -> Tensor<3> {
        let x = if self.input_is_split {
            x
        } else {
            collective::split(x.into_values(), 2, &self.comm).into()
        };
        let is_sum = group.is_some();
        let operands = self.operands(group);
        let Some(lora) = &self.lora else {
            return linear(x, operands);
        };
        // The matmul of the layer and the matmul of its adapter both read the values.
        let x = x.into_values();
        if !is_sum {
            return linear(x.clone(), operands) + lora.delta(x);
        }
        let operands = LinearOperands {
            addend: Some(lora.delta(x.clone())),
            ..operands
        };
        linear(x, operands)
    }

    fn operands(&self, group: Option<TpCommOverlapGroup>) -> LinearOperands<'_> {
        let input = group.map_or(InputLayout::Local, InputLayout::SplitFeatures);
        LinearOperands {
            fp8: self.fp8.as_ref(),
            ..LinearOperands::new(&self.weight, input, self.kernels)
        }
    }

    /// Returns the sum of the [terms](Self::partial) of the ranks, which is the output without the bias.
    pub(super) fn reduced(&self, partial: Tensor<3>) -> Tensor<3> {
        if self.overlapped.is_some() {
            partial
        } else if self.sequence_parallel {
            collective::reduce_scatter_sequence(partial, SEQUENCE_DIM, &self.comm)
        } else {
            collective::reduce(partial, &self.comm)
        }
    }
}
