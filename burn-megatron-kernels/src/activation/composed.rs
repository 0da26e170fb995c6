//! Reference activations, composed of Burn's own operations and differentiated by Burn's autodiff.

use burn::tensor::activation::{relu, sigmoid};
use burn::tensor::{DType, Tensor};

use super::kind::Curve;
use super::{Activation, ActivationOptions, check, statistics, typed};
use crate::error::accept;

const SQRT_2_OVER_PI: f64 = 0.797_884_560_802_865_4;
/// The input above which tanh rounds to 1 in f64. On some devices, tanh overflows for larger inputs.
const SATURATED: f64 = 20.0;

/// Computes [`activate`](super::activate) with separate Burn operations, without a fused kernel.
///
/// 16-bit inputs are converted to f32. The output is rounded back to the input type.
pub fn activate<const D: usize>(
    x: Tensor<D>,
    bias: Option<Tensor<1>>,
    row_weight: Option<Tensor<1>>,
    kind: Activation,
    options: ActivationOptions,
) -> Tensor<D> {
    let shape = x.dims();
    let bias_width = bias.as_ref().map(|bias| bias.dims()[0]);
    let weights = row_weight.as_ref().map(|weight| weight.dims()[0]);
    accept(check(&shape, bias_width, weights, kind, options));
    let dtype = x.dtype();
    let wide = statistics(dtype);
    let mut x = widened(x, wide);
    if let Some(bias) = bias {
        x = x + typed(typed(bias, dtype), wide).reshape(broadcast(D - 1, shape[D - 1]));
    }
    let mut y = if kind.is_gated() {
        gate(x, kind.curve(), options)
    } else {
        curve(x, kind.curve())
    };
    if let Some(weight) = row_weight {
        let mut rows = shape;
        rows[D - 1] = 1;
        y = y * typed(weight, wide).reshape(rows);
    }
    widened(y, dtype)
}

fn widened<const D: usize>(x: Tensor<D>, dtype: DType) -> Tensor<D> {
    if x.dtype() == dtype { x } else { x.cast(dtype) }
}

fn broadcast<const D: usize>(dim: usize, size: usize) -> [usize; D] {
    std::array::from_fn(|i| if i == dim { size } else { 1 })
}

fn gate<const D: usize>(x: Tensor<D>, kind: Curve, options: ActivationOptions) -> Tensor<D> {
    let half = x.dims()[D - 1] / 2;
    let mut shape = x.dims();
    if shape.contains(&0) {
        // Burn's `narrow` of an empty tensor is not part of the autodiff graph. If the backward pass of earlier layers
        // runs a collective, all ranks must reach it.
        shape[D - 1] = half;
        return x.reshape(shape);
    }
    let mut first = x.clone().narrow(D - 1, 0, half);
    let mut second = x.narrow(D - 1, half, half);
    if let Some(clamp) = options.clamp {
        first = first.clamp_max(clamp);
        second = second.clamp(-clamp, clamp);
    }
    if options.offset != 0.0 {
        second = second.add_scalar(options.offset);
    }
    curve(first, kind) * second
}

fn curve<const D: usize>(x: Tensor<D>, kind: Curve) -> Tensor<D> {
    match kind {
        Curve::Normal => {
            let normal = x.clone().mul_scalar(std::f64::consts::FRAC_1_SQRT_2).erf();
            x * normal.add_scalar(1.0).mul_scalar(0.5)
        }
        Curve::Tanh => {
            let cubic = (x.clone() * x.clone())
                .mul_scalar(0.044_715)
                .add_scalar(1.0);
            let inner = (x.clone() * cubic).mul_scalar(SQRT_2_OVER_PI);
            let tanh = inner.clamp(-SATURATED, SATURATED).tanh();
            x * tanh.add_scalar(1.0).mul_scalar(0.5)
        }
        Curve::Quick => x.clone() * sigmoid(x.mul_scalar(1.702)),
        Curve::Silu => x.clone() * sigmoid(x),
        Curve::SquaredRelu => {
            let x = relu(x);
            x.clone() * x
        }
    }
}
