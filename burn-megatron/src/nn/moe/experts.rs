//! The experts of an MoE layer. Each expert is an MLP with two linear layers and an activation between them.

use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::Tensor;
use burn_megatron_kernels::activation;
use burn_megatron_kernels::moe::grouped::grouped_matmul;

use super::expert_product::{ExpertInput, expert_product};
use crate::kernel_selection::Operation;
use crate::mesh::{Axis, Grid, split_evenly};
use crate::nn::LinearKernels;
use crate::nn::fp8::{Fp8Layer, SplitOperands};
use crate::nn::{
    Activation, BuildError, Init, ModelBuilder, ParameterSpec, Placement, RecomputeModule,
    RecomputeRegion, Section, anchored_value,
};

/// Configuration of [`Experts`].
#[derive(Config, Debug)]
pub struct ExpertsConfig {
    /// The hidden size: the number of features per token.
    pub hidden: usize,
    /// The number of intermediate features of one expert, counted after the activation.
    pub width: usize,
    /// The number of experts.
    pub experts: usize,
    /// The activation function. With a gated activation the first layer has `2 width` output features.
    pub activation: Activation,
    /// Whether the linear layers have biases.
    #[config(default = false)]
    pub bias: bool,
    /// The initializer of the weights of the first layer.
    #[config(default = "Init::Normal(0.02)")]
    pub init: Init,
    /// The initializer of the weights of the second layer.
    #[config(default = "Init::Normal(0.02)")]
    pub output_init: Init,
}

/// The rows that the experts of a rank process. A row is one token for one expert.
#[derive(Clone, Debug)]
pub struct ExpertRows {
    /// The tokens `[rows, hidden]`, grouped by expert. The rows of each expert are in token order.
    pub rows: Tensor<2>,
    /// The router weight of each row: `[rows]`.
    pub weights: Tensor<1>,
    /// The number of rows of each expert of this rank.
    pub group_sizes: Vec<usize>,
}

/// The experts of an MoE layer, which are split over the expert axis. The intermediate features of each expert are
/// split over the expert-tensor axis.
///
/// The parameters are placed on the [expert grid](Grid::Expert). Initial values do not depend on the layout. In the
/// shapes below, `e` is the number of experts of this rank, and `f` is the number of intermediate features of each
/// expert on this rank.
///
/// With FP8, each of the two linear layers of each expert is a separate FP8 layer. For example, `up.3` is the first
/// layer of expert 3. Every rank has the FP8 state of all experts, with all scales and histories, but computes only
/// with the experts that it holds. A scale applies to all rows that an expert processes together. These rows come from
/// all ranks that send tokens to the expert. With [delayed](crate::nn::fp8::Fp8Recipe::Delayed) scaling the scales do
/// not depend on the layout. With other recipes, the scales depend on the layout if the sending ranks have different
/// micro-batches.
#[derive(Module, Debug)]
pub struct Experts {
    /// The weights of the up projection: `[e, hidden, f]`. For a gated activation, `[e, hidden, 2 f]` with the gate and
    /// the value.
    pub up: Param<Tensor<3>>,
    /// The bias of the up projection: `[e, f]` or `[e, 2 f]`.
    pub up_bias: Option<Param<Tensor<2>>>,
    /// The weights of the down projection: `[e, f, hidden]`.
    pub down: Param<Tensor<3>>,
    /// The bias of the down projection: `[e, hidden]`.
    pub down_bias: Option<Param<Tensor<2>>>,
    /// The FP8 layers of all experts of the model.
    up_fp8: Vec<Option<Fp8Layer>>,
    down_fp8: Vec<Option<Fp8Layer>>,
    /// The first expert of this rank.
    #[module(skip)]
    first: usize,
    #[module(skip)]
    activation: Activation,
    #[module(skip)]
    fused: bool,
    #[module(skip)]
    linear: LinearKernels,
    /// Whether this rank adds the bias of the down projection. Only one of the expert-tensor ranks adds this bias.
    #[module(skip)]
    adds_bias: bool,
    #[module(skip)]
    activation_region: RecomputeRegion,
}

impl ExpertsConfig {
    /// Builds this rank's part of the experts.
    ///
    /// # Errors
    ///
    /// [`BuildError::Mesh`] if the experts cannot be split over the expert axis, or if `width` cannot be split over the
    /// expert-tensor axis. [`BuildError::Config`] if epilogue fusion is requested. [`BuildError::Fp8`] if FP8 layers
    /// with the same paths exist.
    pub fn init(&self, builder: &ModelBuilder) -> Result<Experts, BuildError> {
        let (hidden, width, experts) = (self.hidden, self.width, self.experts);
        let on = |axis| builder.groups().mesh_rank().on(Grid::Expert, axis);
        let tensor = on(Axis::ExpertTensor);
        let place = on(Axis::Expert);
        let ranks = place.size;
        if builder.kernels().epilogue_fusion() {
            return Err(builder.error(
                "kernels.epilogue_fusion conflicts with experts, which are multiplied together: remove epilogue_fusion",
            ));
        }
        split_evenly("experts", experts, Axis::Expert, ranks)?;
        split_evenly("expert width", width, Axis::ExpertTensor, tensor.size)?;
        let section = Section {
            size: width,
            parts: tensor.size,
        };
        let sections = vec![section; if self.activation.is_gated() { 2 } else { 1 }];
        let up_width = sections.len() * width;
        let placement = Placement::split(0, experts, ranks);
        let up_split = |dim| Placement::Split {
            dim,
            sections: sections.clone(),
        };
        let zeros = Init::Constant(0.0);
        let up = ParameterSpec::new([experts, hidden, up_width], self.init)
            .in_grid(Grid::Expert)
            .with_placement(Axis::Expert, placement.clone())
            .with_placement(Axis::ExpertTensor, up_split(2));
        let down = ParameterSpec::new([experts, width, hidden], self.output_init)
            .in_grid(Grid::Expert)
            .with_placement(Axis::Expert, placement.clone())
            .with_placement(Axis::ExpertTensor, Placement::split(1, width, tensor.size));
        let biases = |size| ParameterSpec {
            decay: false,
            hidden: false,
            ..ParameterSpec::new([experts, size], zeros)
                .in_grid(Grid::Expert)
                .with_placement(Axis::Expert, placement.clone())
        };
        let up_bias = biases(up_width).with_placement(Axis::ExpertTensor, up_split(1));
        let down_bias = biases(hidden).with_sum_over(Axis::ExpertTensor);
        let fp8 = |name, split| builder.fp8_expert_layers(name, experts, split);
        let [split_gradient, split_input] = [false, true].map(|input| SplitOperands {
            input,
            gradient: !input,
        });
        Ok(Experts {
            up: builder.parameter("up", up),
            up_bias: self.bias.then(|| builder.parameter("up_bias", up_bias)),
            down: builder.parameter("down", down),
            down_bias: self.bias.then(|| builder.parameter("down_bias", down_bias)),
            up_fp8: fp8("up", split_gradient)?,
            down_fp8: fp8("down", split_input)?,
            first: place.index * (experts / ranks),
            activation: self.activation,
            linear: builder.linear_kernels(),
            fused: builder.is_fused(Operation::Activation),
            adds_bias: tensor.index == 0,
            activation_region: builder
                .recompute_fused(RecomputeModule::Activation, Operation::Activation)?,
        })
    }
}

impl Experts {
    /// Applies the expert of each row to the row, and multiplies the result by the weight of the row. Returns
    /// `[rows, hidden]`, which is a partial sum over the expert-tensor axis.
    ///
    /// With FP8 and current scaling this call is collective: make it on all ranks of the expert-tensor axis, with the
    /// same rows.
    pub fn forward(&self, input: ExpertRows) -> Tensor<2> {
        let ExpertRows {
            rows: x,
            weights,
            group_sizes,
        } = input;
        let product = |x, weight, layers: &[Option<Fp8Layer>]| {
            let own = &layers[self.first..][..group_sizes.len()];
            expert_product(x, weight, own, &group_sizes, self.linear)
        };
        let mut up = product(ExpertInput::Rows(x), &self.up, &self.up_fp8);
        if let Some(bias) = &self.up_bias {
            let ones = weights.ones_like().cast(up.dtype());
            up = with_bias(up, bias, ones, &group_sizes);
        }
        let activated = if self.activation_region.is_active() {
            ExpertInput::Activation {
                x: up,
                weights: weights.clone(),
                activation: self.activation,
            }
        } else {
            ExpertInput::Rows(self.activated(up, weights.clone()))
        };
        let down = product(activated, &self.down, &self.down_fp8);
        match &self.down_bias {
            Some(bias) => {
                let share = if self.adds_bias { 1.0 } else { 0.0 };
                let weights = weights.cast(down.dtype()).mul_scalar(share);
                with_bias(down, bias, weights, &group_sizes)
            }
            None => down,
        }
    }

    fn activated(&self, x: Tensor<2>, weights: Tensor<1>) -> Tensor<2> {
        let options = self.activation.options();
        let activate = if self.fused {
            activation::activate
        } else {
            activation::composed::activate
        };
        activate(x, None, Some(weights), self.activation.kernel(), options)
    }
}

/// Adds the bias `[experts, out]` of each row's expert to `[rows, out]`, times the weight of the row.
fn with_bias(
    rows: Tensor<2>,
    bias: &Param<Tensor<2>>,
    weights: Tensor<1>,
    group_sizes: &[usize],
) -> Tensor<2> {
    let bias = anchored_value(bias, &rows).unsqueeze_dim(1);
    // A bias is the weight of an input with one feature.
    rows + grouped_matmul(weights.unsqueeze_dim(1), bias, group_sizes)
}
