//! The MLP, whose intermediate features are split over the tensor axis.

use burn::config::Config;
use burn::module::Module;
use burn::tensor::{Device, Tensor};
use burn_megatron_kernels::gemm::gelu::{check_gelu_epilogues, check_gelu_shape};

use super::lora::LoraTarget;
use super::{
    Activation, Bias, BuildError, ColumnParallelLinear, ColumnParallelLinearConfig, Init,
    LinearInput, ModelBuilder, Norm, OutputSection, RecomputeModule, RecomputeRegion, Residual,
    RowParallelLinear, RowParallelLinearConfig,
};
use crate::kernel_selection::{EpilogueShape, Operation};

/// Configuration of a [`ParallelMlp`].
#[derive(Config, Debug)]
pub struct ParallelMlpConfig {
    /// The hidden size: the number of features of the input and the output.
    pub hidden: usize,
    /// The number of intermediate features, counted after the activation.
    pub width: usize,
    /// The activation function. With a gated activation the first layer has `2 width` output features.
    pub activation: Activation,
    /// Whether the linear layers have biases.
    #[config(default = true)]
    pub bias: bool,
    /// The initializer of the weight of the first layer.
    #[config(default = "Init::Normal(0.02)")]
    pub init: Init,
    /// The initializer of the weight of the second layer.
    #[config(default = "Init::Normal(0.02)")]
    pub output_init: Init,
}

/// An MLP with tensor parallelism: two linear layers with an activation between them. The forward pass and the backward
/// pass have one collective each.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_megatron::nn::{Activation, ParallelMlpConfig};
/// use burn_megatron::prelude::*;
///
/// let layout = ParallelConfig::new().with_tensor(2);
/// let shapes = World::threads(2)?.run(|rank| {
///     let groups = ParallelContext::new(&layout, &rank)?;
///     let builder = ModelBuilder::new(&groups, &Device::flex());
///     let mlp = ParallelMlpConfig::new(8, 12, Activation::SwiGlu).init(&builder)?;
///     let y = mlp.forward(Tensor::ones([1, 4, 8], &Device::flex()));
///     Ok::<_, AnyError>((mlp.up.weight.val().dims(), mlp.down.weight.val().dims(), y.dims()))
/// })?;
/// // Each rank has 6 columns of the gate and 6 columns of the value.
/// assert_eq!(shapes, [([8, 12], [6, 8], [1, 4, 8]); 2]);
/// # Ok::<(), AnyError>(())
/// ```
#[derive(Module, Debug)]
pub struct ParallelMlp {
    /// The up projection. With a gated activation the weight holds the gate and the value.
    pub up: ColumnParallelLinear,
    /// The down projection.
    pub down: RowParallelLinear,
    #[module(skip)]
    activation: Activation,
    #[module(skip)]
    fused: bool,
    /// Whether GELU is fused into the epilogues of the matmuls.
    #[module(skip)]
    pub(super) epilogues: bool,
    #[module(skip)]
    region: RecomputeRegion,
    #[module(skip)]
    activation_region: RecomputeRegion,
}

impl ParallelMlpConfig {
    /// Builds this rank's part of the layer.
    ///
    /// # Errors
    ///
    /// [`BuildError::Mesh`] if the width cannot be split over the tensor axis. [`BuildError::Config`] if [epilogue
    /// fusion](crate::kernel_selection::KernelChoices::epilogue_fusion) is requested but not available for this MLP.
    pub fn init(&self, builder: &ModelBuilder) -> Result<ParallelMlp, BuildError> {
        let region = builder.recompute_region(Some(RecomputeModule::Mlp));
        self.init_in(region, builder)
    }

    /// Builds this rank's part of the layer with the given region of activation recomputation.
    pub(super) fn init_in(
        &self,
        region: RecomputeRegion,
        builder: &ModelBuilder,
    ) -> Result<ParallelMlp, BuildError> {
        if self.activation == Activation::SquaredRelu && *builder.device() == Device::flex() {
            let reason = "Burn's squared ReLU is faster on the CPU";
            builder
                .kernels()
                .prefer_unfused(Operation::Activation, reason);
        }
        let section = OutputSection::new("MLP width".into(), self.width, 1);
        let sections = vec![section; if self.activation.is_gated() { 2 } else { 1 }];
        let targets = if self.activation.is_gated() {
            vec![LoraTarget::Gate, LoraTarget::Up]
        } else {
            vec![LoraTarget::Up]
        };
        let up = ColumnParallelLinearConfig::new(self.hidden, sections.len() * self.width)
            .with_sections(sections)
            .with_init(self.init)
            .with_bias(self.bias)
            .with_targets(targets)
            .init(&builder.child("up"))?;
        let down = RowParallelLinearConfig::new(self.width, self.hidden)
            .with_init(self.output_init)
            .with_bias(self.bias)
            .with_target(Some(LoraTarget::Down))
            .init(&builder.child("down"))?;
        let sizes = [self.hidden, self.width];
        let epilogues = has_epilogues(self.activation, sizes, (&up, &down), builder)?;
        Ok(ParallelMlp {
            up,
            down,
            epilogues,
            activation: self.activation,
            fused: builder.is_fused(Operation::Activation),
            region,
            activation_region: builder
                .recompute_fused(RecomputeModule::Activation, Operation::Activation)?,
        })
    }
}

impl ParallelMlp {
    /// Applies the MLP to `[batch, seq, hidden]` and returns the same shape. Under sequence parallelism the shape is
    /// `[batch, seq / tensor, hidden]`.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let y = self.product(x);
        self.down.with_bias(y)
    }

    /// Returns the output without the bias of the second layer, and this bias. The caller adds the bias in a fused
    /// operation.
    pub fn forward_without_bias(&self, x: Tensor<3>) -> (Tensor<3>, Option<Bias>) {
        let y = self.product(x);
        let bias = self.down.bias_of(&y);
        (y, bias)
    }

    /// Returns the output without the bias of the second layer.
    fn product(&self, x: Tensor<3>) -> Tensor<3> {
        if !self.region.is_active() {
            return self.down.product(self.activated(x));
        }
        self.down.reduced(self.region.run(x, self.body()))
    }

    /// Returns the body of the recomputed region.
    fn body(&self) -> impl Fn(Tensor<3>) -> Tensor<3> + use<> {
        let mlp = self.clone();
        move |x| mlp.down.partial(mlp.activated(x))
    }

    /// Adds the pending branch of `x` to the residual stream, normalizes the sum with `norm`, and applies
    /// [`forward_without_bias`](Self::forward_without_bias) to the normalized values. Also returns the sum, which is
    /// the new residual stream. `norm` must be built with
    /// [`NormConfig::init_for_linear`](super::NormConfig::init_for_linear).
    pub fn forward_normalized(
        &self,
        norm: &Norm,
        x: Residual,
    ) -> ((Tensor<3>, Option<Bias>), Tensor<3>) {
        let (y, stream) = if self.region.is_active() {
            let (partial, stream) = norm.run_in(&self.region, x, self.body());
            (self.down.reduced(partial), stream)
        } else {
            let (activated, stream) = self.activated_norm(norm, x);
            (self.down.product(activated), stream)
        };
        let bias = self.down.bias_of(&y);
        ((y, bias), stream)
    }

    fn activated_norm(&self, norm: &Norm, x: Residual) -> (LinearInput, Tensor<3>) {
        if self.epilogues {
            let (normal, stream) = norm.forward_add(x);
            return (self.activated(normal), stream);
        }
        let (up, stream) = self.up.forward_normalized_without_bias(norm, x);
        (self.activation_of(up), stream)
    }

    fn activated(&self, x: Tensor<3>) -> LinearInput {
        if self.epilogues {
            return LinearInput::Gelu(self.up.forward_to_gelu(x));
        }
        self.activation_of(self.up.forward_without_bias(x))
    }

    fn activation_of(&self, (x, bias): (Tensor<3>, Option<Bias>)) -> LinearInput {
        LinearInput::Activation {
            x,
            bias,
            activation: self.activation,
            fused: self.fused,
            recomputed: self.activation_region.is_active(),
        }
    }
}

/// Returns whether epilogue fusion is requested. If it is, records the shape of the MLP in the kernel selection.
///
/// # Errors
///
/// [`BuildError::Config`] if epilogue fusion is requested but not available for this MLP.
fn has_epilogues(
    activation: Activation,
    [hidden, width]: [usize; 2],
    (up, down): (&ColumnParallelLinear, &RowParallelLinear),
    builder: &ModelBuilder,
) -> Result<bool, BuildError> {
    if !builder.kernels().epilogue_fusion() {
        return Ok(false);
    }
    let refused = |reason: String| {
        builder.error(format!(
            "kernels.epilogue_fusion: {reason}; or remove epilogue_fusion"
        ))
    };
    if activation != Activation::GeluTanh {
        return Err(refused(format!(
            "it requires the activation GeluTanh, but this MLP has {activation:?}: use a model with gelu-tanh"
        )));
    }
    if let Some(obstacle) = up.epilogue_obstacle().or(down.epilogue_obstacle()) {
        return Err(refused(format!(
            "it conflicts with {obstacle}: remove one of the two"
        )));
    }
    for module in [RecomputeModule::Activation, RecomputeModule::Norm] {
        if builder.recompute_part(module).is_on() {
            let name = module.name();
            return Err(refused(format!(
                "the fused products keep the input and the output of GELU, and cannot recompute {name:?}: recompute \
                 \"mlp\", or whole layers"
            )));
        }
    }
    let (dtype, width) = (builder.compute_dtype(), width / builder.place().size);
    let checked = if builder.composes_epilogues {
        Ok(())
    } else if builder.is_outline() {
        check_gelu_shape(dtype, width)
    } else {
        check_gelu_epilogues(builder.device(), dtype, [hidden, width])
    };
    checked.map_err(refused)?;
    builder.kernels().add_epilogues(EpilogueShape {
        hidden,
        width,
        bias: up.bias.is_some(),
    });
    Ok(true)
}
