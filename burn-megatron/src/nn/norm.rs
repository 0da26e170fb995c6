//! LayerNorm and RMSNorm over the last dimension.

use burn::module::{Module, Param};
use burn::tensor::Tensor;
use burn_megatron_kernels::norm::{self, NormOptions};
use serde::{Deserialize, Serialize};

use super::{Init, ParameterSpec, Scope, value_at};
use crate::choice::Operation;

/// Which normalisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NormKind {
    /// `(x - mean) / sqrt(variance + epsilon) * weight + bias` (Ba et al. 2016).
    Layer,
    /// `x / sqrt(mean of x^2 + epsilon) * weight` (Zhang and Sennrich 2019).
    Rms,
}

/// Configuration of a [`Norm`].
#[derive(Clone, Copy, Debug)]
pub struct NormConfig {
    /// Which normalisation.
    pub kind: NormKind,
    /// Features.
    pub hidden: usize,
    /// Added to the variance.
    pub epsilon: f64,
    /// Whether the weight is kept as its distance from 1, so that decay pulls it there.
    pub zero_centered: bool,
    /// Whether each rank normalises its part of the sequence.
    pub sequence_parallel: bool,
}

/// LayerNorm or RMSNorm of `[batch, seq, hidden]`.
///
/// Under sequence parallelism each rank normalises its part of the sequence, so the gradients of
/// weight and bias are summed over the tensor axis.
#[derive(Module, Debug)]
pub struct Norm {
    /// `[hidden]`; a factor of 1 at the start.
    pub weight: Param<Tensor<1>>,
    /// `[hidden]`, 0 at the start; LayerNorm only.
    pub bias: Option<Param<Tensor<1>>>,
    #[module(skip)]
    options: NormOptions,
    #[module(skip)]
    fused: bool,
}

impl NormConfig {
    /// Builds the norm, the same on every rank.
    pub fn init(&self, scope: &Scope) -> Norm {
        let spec = |value| {
            ParameterSpec::new([self.hidden], Init::Constant(value))
                .with_partial_gradient(self.sequence_parallel)
        };
        let weight = if self.zero_centered { 0.0 } else { 1.0 };
        Norm {
            weight: scope.parameter("weight", spec(weight)),
            bias: (self.kind == NormKind::Layer).then(|| scope.parameter("bias", spec(0.0))),
            options: NormOptions {
                epsilon: self.epsilon,
                zero_centered: self.zero_centered,
            },
            fused: scope.is_fused(Operation::Norm),
        }
    }
}

impl Norm {
    /// A norm over `hidden` features; see [`NormConfig`] for more choices.
    pub fn new(
        kind: NormKind,
        hidden: usize,
        epsilon: f64,
        sequence_parallel: bool,
        scope: &Scope,
    ) -> Self {
        let config = NormConfig {
            kind,
            hidden,
            epsilon,
            zero_centered: false,
            sequence_parallel,
        };
        config.init(scope)
    }

    /// `[batch, seq, hidden]` to the same.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let weight = value_at(&self.weight, &x);
        let options = self.options;
        match (&self.bias, self.fused) {
            (Some(bias), fused) => {
                let bias = Some(value_at(bias, &x));
                match fused {
                    true => norm::layer_norm(x, weight, bias, options),
                    false => norm::composed::layer_norm(x, weight, bias, options),
                }
            }
            (None, true) => norm::rms_norm(x, weight, options),
            (None, false) => norm::composed::rms_norm(x, weight, options),
        }
    }

    /// Adds `x` to the residual stream, and normalises the sum: returns both, the norm first.
    pub fn forward_add(&self, x: Tensor<3>, residual: Tensor<3>) -> (Tensor<3>, Tensor<3>) {
        let weight = value_at(&self.weight, &residual);
        let options = self.options;
        match (&self.bias, self.fused) {
            (Some(bias), fused) => {
                let bias = Some(value_at(bias, &residual));
                match fused {
                    true => norm::add_layer_norm(x, residual, weight, bias, options),
                    false => norm::composed::add_layer_norm(x, residual, weight, bias, options),
                }
            }
            (None, true) => norm::add_rms_norm(x, residual, weight, options),
            (None, false) => norm::composed::add_rms_norm(x, residual, weight, options),
        }
    }
}
