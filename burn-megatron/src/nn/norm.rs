//! LayerNorm and RMSNorm over the last dimension.

use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::Tensor;
use burn_megatron_kernels::gradient::Parameter;
use burn_megatron_kernels::norm::{self, NormOptions};
use serde::{Deserialize, Serialize};

use super::hook::fused_parameter;
use super::{Init, ModelBuilder, ParameterSpec, Residual, anchored_value};
use crate::choice::Operation;
use crate::mesh::Axis;

/// The kind of normalisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
    /// The kind of normalisation.
    pub kind: NormKind,
    /// Features.
    pub hidden: usize,
    /// Added to the variance.
    pub epsilon: f64,
    /// Whether the weight is stored as its difference from 1, so that weight decay pulls it to 1.
    #[config(default = false)]
    pub zero_centered: bool,
}

/// LayerNorm or RMSNorm of `[batch, seq, hidden]`.
///
/// Under sequence parallelism each rank normalises its part of the sequence, so the gradients of
/// weight and bias are summed over the tensor axis.
#[derive(Module, Debug)]
pub struct Norm {
    /// `[hidden]`; initially a factor of 1.
    pub weight: Param<Tensor<1>>,
    /// `[hidden]`; initially 0; LayerNorm only.
    pub bias: Option<Param<Tensor<1>>>,
    #[module(skip)]
    options: NormOptions,
    #[module(skip)]
    fused: bool,
}

impl NormConfig {
    /// Builds the norm, replicated on every rank.
    pub fn init(&self, builder: &ModelBuilder) -> Norm {
        let spec = |value| {
            ParameterSpec::new([self.hidden], Init::Constant(value))
                .with_sum_over(builder.sequence_parallel().then_some(Axis::Tensor))
        };
        let weight = if self.zero_centered { 0.0 } else { 1.0 };
        Norm {
            weight: builder.parameter("weight", spec(weight)),
            bias: (self.kind == NormKind::Layer).then(|| builder.parameter("bias", spec(0.0))),
            options: NormOptions {
                epsilon: self.epsilon,
                zero_centered: self.zero_centered,
            },
            fused: builder.is_fused(Operation::Norm),
        }
    }
}

impl Norm {
    /// `[batch, seq, hidden]` to the same.
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

    /// The sum of a residual stream and its branch, normalised, and the sum.
    pub fn forward_add(&self, x: Residual) -> (Tensor<3>, Tensor<3>) {
        if !self.fused {
            let sum = x.sum();
            return (self.forward(sum.clone()), sum);
        }
        let stream = x.for_norm();
        let (weight, bias) = self.fused_parameters(&stream.x);
        stream.normalise(self.kind(), weight, bias, self.options)
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
