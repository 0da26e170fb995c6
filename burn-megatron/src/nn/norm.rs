//! LayerNorm and RMSNorm over the last dimension.

use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::Tensor;
use burn_megatron_kernels::gradient::Parameter;
use burn_megatron_kernels::norm::{self, NormOptions};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::hook::fused_parameter;
use super::linear::LinearOperands;
use super::recompute::apply_discarding;
use super::{
    BuildError, Init, ModelBuilder, ParameterSpec, Placement, RecomputeModule, RecomputeRegion,
    Residual, anchored_value,
};
use crate::kernel_selection::Operation;
use crate::mesh::Axis;

/// The kind of normalization.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum NormKind {
    /// `(x - mean) / sqrt(variance + epsilon) * weight + bias` (Ba et al. 2016).
    Layer,
    /// `x / sqrt(mean of x^2 + epsilon) * weight` (Zhang and Sennrich 2019).
    Rms,
}

/// Configuration of a [`Norm`].
#[derive(Config, Debug)]
pub struct NormConfig {
    /// The kind of normalization.
    pub kind: NormKind,
    /// The number of features.
    pub hidden: usize,
    /// The constant that is added to the variance (LayerNorm) or to the mean square (RMSNorm).
    pub epsilon: f64,
    /// Whether the weight is stored as its difference from 1. Weight decay then pulls the effective weight towards 1.
    #[config(default = false)]
    pub zero_centered: bool,
}

/// LayerNorm or RMSNorm over the last dimension of `[batch, seq, hidden]`.
///
/// Under sequence parallelism each rank normalizes its part of the sequence, so the gradients of the weight and the
/// bias are summed over the tensor axis.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_megatron::nn::{NormConfig, NormKind};
/// use burn_megatron::prelude::*;
///
/// let builder = ModelBuilder::new(&ParallelContext::single(), &Device::flex());
/// let norm = NormConfig::new(NormKind::Rms, 4, 1e-5).init(&builder);
/// let y = norm.forward(Tensor::<3>::full([1, 2, 4], 3.0, &Device::flex()));
/// // The root mean square is 3, so every element becomes 1.
/// assert!(y.sub_scalar(1.0).abs().max().into_scalar::<f32>() < 1e-4);
/// ```
#[derive(Module, Debug)]
pub struct Norm {
    /// The weight `[hidden]`. It is initialized to 1, or to 0 if the weight is stored as its difference from 1.
    pub weight: Param<Tensor<1>>,
    /// The bias `[hidden]`, initialized to 0. `None` for RMSNorm.
    pub bias: Option<Param<Tensor<1>>>,
    #[module(skip)]
    options: NormOptions,
    #[module(skip)]
    fused: bool,
    #[module(skip)]
    region: RecomputeRegion,
}

impl NormConfig {
    /// Builds the norm, which is replicated on every rank.
    pub fn init(&self, builder: &ModelBuilder) -> Norm {
        let sum_over = builder.sequence_parallel().then_some(Axis::Tensor);
        self.init_with(|spec| spec.with_sum_over(sum_over), builder)
    }

    /// Builds the norm with this placement on the tensor axis.
    pub(super) fn init_placed(&self, placement: Placement, builder: &ModelBuilder) -> Norm {
        let placed = |spec: ParameterSpec<1>| spec.with_placement(Axis::Tensor, placement.clone());
        self.init_with(placed, builder)
    }

    fn init_with(
        &self,
        with: impl Fn(ParameterSpec<1>) -> ParameterSpec<1>,
        builder: &ModelBuilder,
    ) -> Norm {
        let spec = |value| with(ParameterSpec::new([self.hidden], Init::Constant(value)));
        let weight = if self.zero_centered { 0.0 } else { 1.0 };
        Norm {
            weight: builder.parameter("weight", spec(weight)),
            bias: (self.kind == NormKind::Layer).then(|| builder.parameter("bias", spec(0.0))),
            options: NormOptions {
                epsilon: self.epsilon,
                zero_centered: self.zero_centered,
            },
            fused: builder.is_fused(Operation::Norm),
            region: RecomputeRegion::default(),
        }
    }

    /// Builds a norm between a residual stream and a linear layer: the norm normalizes the residual stream, and the
    /// linear layer takes the result as its input. See
    /// [`ParallelAttention::forward_normalized`](super::ParallelAttention::forward_normalized) and
    /// [`ParallelMlp::forward_normalized`](super::ParallelMlp::forward_normalized). The output of the norm is
    /// recomputed in the backward pass if the recomputation settings contain [`RecomputeModule::Norm`].
    ///
    /// # Errors
    ///
    /// [`BuildError::Config`] if the settings request recomputation of the norm, but the norm is not fused.
    pub fn init_for_linear(&self, builder: &ModelBuilder) -> Result<Norm, BuildError> {
        let region = builder.recompute_fused(RecomputeModule::Norm, Operation::Norm)?;
        Ok(Norm {
            region,
            ..self.init(builder)
        })
    }
}

impl Norm {
    /// Normalizes `[batch, seq, hidden]` and returns the same shape.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let options = self.options;
        if self.fused {
            let (weight, bias) = self.fused_parameters(&x);
            return norm::normalise(self.kind(), x, weight, bias, options);
        }
        let weight = anchored_value(&self.weight, &x);
        match &self.bias {
            Some(bias) => {
                let bias = Some(anchored_value(bias, &x));
                norm::composed::layer_norm(x, weight, bias, options)
            }
            None => norm::composed::rms_norm(x, weight, options),
        }
    }

    /// Adds the output of the pending branch to the residual stream, and normalizes the sum. Returns the normalized
    /// sum, and the sum itself.
    pub fn forward_add(&self, x: Residual) -> (Tensor<3>, Tensor<3>) {
        if !self.fused {
            let sum = x.sum();
            return (self.forward(sum.clone()), sum);
        }
        let stream = x.for_norm();
        let (weight, bias) = self.fused_parameters(&stream.x);
        stream.normalise(self.kind(), weight, bias, self.options)
    }

    /// Applies `body` to the normalized residual stream in `region`. Returns the output of `body` and the summed
    /// residual stream. If the norm is also [recomputed](NormConfig::init_for_linear), it is part of the region, which
    /// then keeps only the residual stream.
    pub(super) fn run_in(
        &self,
        region: &RecomputeRegion,
        x: Residual,
        body: impl Fn(Tensor<3>) -> Tensor<3> + Send + Sync + 'static,
    ) -> (Tensor<3>, Tensor<3>) {
        if !(region.is_active() && self.is_recomputed()) {
            let (normal, stream) = self.forward_add(x);
            return (region.run(normal, body), stream);
        }
        let ((sum, added_bias), norm) = (x.into_parts(), self.clone());
        let [y, stream] = region.run_outputs(sum, move |sum| {
            let (normal, stream) = norm.forward_add(Residual::from_parts(sum, added_bias.clone()));
            [body(normal), stream]
        });
        (y, stream)
    }

    /// Returns whether the norm is recomputed in the backward pass of the current micro-batch.
    pub(super) fn is_recomputed(&self) -> bool {
        self.region.is_active()
    }

    /// Returns a matmul of the normalized residual stream, and the summed residual stream. The normalized residual
    /// stream is not kept for the backward pass. `operands` gets the tensor to which parameters are anchored.
    pub(super) fn product<'a>(
        &self,
        x: Residual,
        operands: impl FnOnce(&Tensor<3>) -> LinearOperands<'a>,
    ) -> (Tensor<3>, Tensor<3>) {
        let stream = x.for_norm();
        let (weight, bias) = self.fused_parameters(&stream.x);
        let (anchor, is_autodiff) = (stream.x.clone(), stream.is_autodiff());
        let (function, inputs) = stream.into_function(self.kind(), weight, bias, self.options);
        let (product, others) = operands(&anchor).into_function(&anchor, false);
        let [y, stream] = apply_discarding(function, inputs, product, others);
        (y, if is_autodiff { stream } else { stream.inner() })
    }

    fn fused_parameters(&self, x: &Tensor<3>) -> (Parameter, Option<Parameter>) {
        let bias = self.bias.as_ref();
        let weight = fused_parameter(&self.weight, x);
        (weight, bias.map(|bias| fused_parameter(bias, x)))
    }

    fn kind(&self) -> norm::NormKind {
        match self.bias {
            Some(_) => norm::NormKind::Layer,
            None => norm::NormKind::Rms,
        }
    }
}
