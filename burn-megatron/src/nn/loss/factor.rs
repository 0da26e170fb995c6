//! Factors of a loss in the backward pass.

use burn::tensor::{DType, Device, Tensor};

/// A factor of a loss, such as a loss scale. The loss is multiplied by this factor before its backward pass. The factor
/// must not be 0.
#[derive(Clone, Debug)]
pub enum LossFactor {
    /// A number on the host.
    Number(f64),
    /// A tensor `[1]` on the device, which is not tracked by autodiff.
    Device(Tensor<1>),
}

impl LossFactor {
    /// Multiplies each element of `x` by the factor.
    pub fn scale(&self, x: Tensor<1>) -> Tensor<1> {
        match self {
            Self::Number(1.0) => x,
            Self::Number(number) => x.mul_scalar(*number),
            Self::Device(factor) => {
                let factor = factor.clone().cast(x.dtype());
                let is_autodiff = x.is_autodiff();
                x * if is_autodiff {
                    Tensor::from_inner(factor)
                } else {
                    factor
                }
            }
        }
    }

    /// Returns the factor multiplied by `number`, which must not be 0.
    pub fn times(&self, number: f64) -> Self {
        match self {
            Self::Number(own) => Self::Number(own * number),
            Self::Device(factor) => Self::Device(factor.clone().mul_scalar(number)),
        }
    }

    /// Returns the factor as the gradient of `count` losses in `dtype`.
    pub(super) fn expanded(&self, count: usize, device: &Device, dtype: DType) -> Tensor<1> {
        match self {
            Self::Number(number) => Tensor::full([count], *number, (device, dtype)),
            Self::Device(factor) => factor.clone().cast(dtype).expand([count]),
        }
    }

    /// Returns the ratio of `upstream` `[1]` to the factor. Gradients that were computed for the factor are multiplied
    /// by the ratio. The ratio is 1 if `upstream` is the factor.
    pub(super) fn ratio(&self, upstream: Tensor<1>) -> Tensor<1> {
        match self {
            Self::Number(1.0) => upstream,
            Self::Number(number) => upstream.div_scalar(*number),
            Self::Device(factor) => upstream.clone() / factor.clone().cast(upstream.dtype()),
        }
    }
}

impl From<f64> for LossFactor {
    fn from(number: f64) -> Self {
        Self::Number(number)
    }
}

impl From<Tensor<1>> for LossFactor {
    fn from(tensor: Tensor<1>) -> Self {
        Self::Device(tensor)
    }
}
