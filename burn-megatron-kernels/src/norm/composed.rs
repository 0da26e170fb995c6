//! Reference norms, composed of Burn's own operations and differentiated by Burn.
//!
//! They use the same formulas and the same precision as the fused norms, but store every intermediate tensor.

use burn::tensor::Tensor;

use super::{NormKind, NormOptions};
use crate::cpu::wide;

/// Computes [`layer_norm`](super::layer_norm) with Burn's operations, without a fused kernel.
pub fn layer_norm<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<1>,
    bias: Option<Tensor<1>>,
    options: NormOptions,
) -> Tensor<D> {
    let dtype = x.dtype();
    let x = x.cast(wide(dtype));
    let x = x.clone() - x.mean_dim(D - 1);
    let normalised = by_mean_square(x, options);
    affine(normalised, weight, bias, options).cast(dtype)
}

/// Computes [`rms_norm`](super::rms_norm) with Burn's operations, without a fused kernel.
pub fn rms_norm<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<1>,
    options: NormOptions,
) -> Tensor<D> {
    let dtype = x.dtype();
    let normalised = by_mean_square(x.cast(wide(dtype)), options);
    affine(normalised, weight, None, options).cast(dtype)
}

/// Computes [`add_normalise`](super::add_normalise) with Burn's operations, without a fused kernel.
pub fn add_normalise<const D: usize>(
    kind: NormKind,
    x: Tensor<D>,
    x_bias: Option<Tensor<1>>,
    residual: Tensor<D>,
    weight: Tensor<1>,
    bias: Option<Tensor<1>>,
    options: NormOptions,
) -> (Tensor<D>, Tensor<D>) {
    let (dtype, of_sum) = (x.dtype(), residual.dtype());
    let computed = wide(dtype);
    let mut x = x.cast(computed);
    if let Some(bias) = x_bias {
        x = x + bias.cast(computed).unsqueeze();
    }
    let sum = (x + residual.cast(computed)).cast(of_sum);
    // A sum in f32 is not rounded to the type of `x` before it is normalized.
    let y = match kind {
        NormKind::Layer => layer_norm(sum.clone(), weight, bias, options),
        NormKind::Rms => rms_norm(sum.clone(), weight, options),
    };
    (y.cast(dtype), sum)
}

/// Computes `x / sqrt(mean(x^2) + epsilon)` over the last dimension.
fn by_mean_square<const D: usize>(x: Tensor<D>, options: NormOptions) -> Tensor<D> {
    let square = (x.clone() * x.clone()).mean_dim(D - 1);
    x / (square + options.epsilon).sqrt()
}

fn affine<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<1>,
    bias: Option<Tensor<1>>,
    options: NormOptions,
) -> Tensor<D> {
    let dtype = x.dtype();
    let weight = if options.zero_centered {
        weight.cast(dtype) + 1.0
    } else {
        weight.cast(dtype)
    };
    let x = x * weight.unsqueeze();
    match bias {
        Some(bias) => x + bias.cast(dtype).unsqueeze(),
        None => x,
    }
}
