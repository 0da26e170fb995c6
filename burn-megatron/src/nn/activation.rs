//! Activation functions of MLPs.

use burn::tensor::Tensor;
use burn_megatron_kernels::activation::{self, Activation as KernelActivation, ActivationOptions};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Bias;

/// The activation function of an MLP. Gated variants split the last dimension of the input into two halves, `a` and
/// `b`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Activation {
    /// Exact GELU: `x Phi(x)`, where `Phi` is the standard normal distribution function (Hendrycks and Gimpel 2016).
    Gelu,
    /// The tanh approximation of GELU, as in GPT-2.
    GeluTanh,
    /// The sigmoid approximation of GELU: `x sigmoid(1.702 x)`.
    QuickGelu,
    /// Squared ReLU: `max(x, 0)^2` (So et al. 2021).
    SquaredRelu,
    /// Gated SiLU: `a sigmoid(a) b` (Shazeer 2020).
    SwiGlu,
    /// Gated GELU: `gelu(a) b`, with the tanh approximation of GELU (Shazeer 2020).
    GeGlu,
    /// Gated GELU with the sigmoid approximation: `a sigmoid(1.702 a) b`.
    QuickGeGlu,
    /// The activation of gpt-oss, with both halves clamped:
    /// `min(a, 7) sigmoid(1.702 min(a, 7)) (min(max(b, -7), 7) + 1)`.
    ClampedSwiGlu,
}

/// The clamping limit of both halves of [`Activation::ClampedSwiGlu`] (`swiglu_limit`).
const CLAMP: f64 = 7.0;

impl Activation {
    /// Returns whether the activation function is gated. A gated activation function takes two input features for each
    /// output feature.
    pub fn is_gated(self) -> bool {
        self.kernel().is_gated()
    }

    pub(super) fn kernel(self) -> KernelActivation {
        match self {
            Self::Gelu => KernelActivation::Gelu,
            Self::GeluTanh => KernelActivation::GeluTanh,
            Self::QuickGelu => KernelActivation::QuickGelu,
            Self::SquaredRelu => KernelActivation::SquaredRelu,
            Self::SwiGlu => KernelActivation::SwiGlu,
            Self::GeGlu => KernelActivation::GeGlu,
            Self::QuickGeGlu | Self::ClampedSwiGlu => KernelActivation::QuickGeGlu,
        }
    }

    pub(super) fn options(self) -> ActivationOptions {
        match self {
            Self::ClampedSwiGlu => ActivationOptions {
                clamp: Some(CLAMP),
                offset: 1.0,
            },
            _ => ActivationOptions::default(),
        }
    }

    /// Applies the fused activation function to `[batch, seq, width]`. Gated variants return
    /// `[batch, seq, width / 2]`.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_megatron::nn::Activation;
    ///
    /// let x = Tensor::<3>::ones([1, 2, 8], &Device::flex());
    /// assert_eq!(Activation::GeluTanh.forward(x.clone()).dims(), [1, 2, 8]);
    /// assert!(Activation::SwiGlu.is_gated());
    /// assert_eq!(Activation::SwiGlu.forward(x).dims(), [1, 2, 4]);
    /// ```
    pub fn forward(self, x: Tensor<3>) -> Tensor<3> {
        self.forward_biased(x, None, true)
    }

    /// Applies the activation function to `x + bias`. If `fused` is true, the fused kernel is used.
    pub fn forward_biased(self, x: Tensor<3>, bias: Option<Bias>, fused: bool) -> Tensor<3> {
        let options = self.options();
        if fused {
            let bias = bias.map(Bias::into_parameter);
            activation::activate_with(x, bias, None, self.kernel(), options)
        } else {
            let bias = bias.map(Bias::into_tensor);
            activation::composed::activate(x, bias, None, self.kernel(), options)
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device, TensorData};

    use super::*;

    /// Compares with the formula of gpt-oss, for inputs with clamped and unclamped halves.
    #[test]
    fn a_clamped_activation_is_that_of_gpt_oss() {
        let (gates, values) = ([-20.0, -1.5, 0.5, 7.5, 30.0], [8.0, -0.25, -9.0, 3.0, 7.5]);
        let wanted = gates.iter().zip(&values).map(|(gate, value)| {
            let gate = f64::min(*gate, 7.0);
            let value = f64::clamp(*value, -7.0, 7.0);
            (value + 1.0) * gate / (1.0 + (-1.702 * gate).exp())
        });
        let wanted: Vec<f64> = wanted.collect();
        let data = TensorData::new([gates, values].concat(), [1, 1, 10]);
        let x = Tensor::<3>::from_data(data, (&Device::flex(), DType::F64));
        for fused in [false, true] {
            let y = Activation::ClampedSwiGlu.forward_biased(x.clone(), None, fused);
            for (y, wanted) in y.into_data().iter::<f64>().zip(&wanted) {
                assert!((y - wanted).abs() < 1e-13, "{y} and {wanted}");
            }
        }
    }
}
