//! Loads vectors of the input matrix, or computes them if the input is an activation.

use cubecl::prelude::*;

use super::plan::QuantizePlan;
use crate::activation::kernel::output;

/// Returns one vector of the matrix. A row has `wide` vectors.
#[cube]
pub(super) fn vector_at<F: Float, N: Size>(
    x: &[Vector<F, N>],
    bias: &ComptimeOption<OwnedTensor<Vector<F, N>>>,
    row: usize,
    at: usize,
    wide: usize,
    #[comptime] plan: QuantizePlan,
) -> Vector<F, N> {
    if comptime!(plan.activation.is_none()) {
        x[row * wide + at]
    } else {
        let variant = comptime!(plan.variant());
        let first = row * wide * comptime!(variant.halves()) + at;
        let a = biased(x, bias, first, at);
        let mut b = a;
        if comptime!(variant.gated) {
            b = biased(x, bias, first + wide, at + wide);
        }
        // The computation is the same as in the activation's own kernel without a clamp and with an offset of 0.
        Vector::cast_from(output::<N>(a, b, 0.0f32, 0.0f32, variant))
    }
}

#[cube]
fn biased<F: Float, N: Size>(
    x: &[Vector<F, N>],
    bias: &ComptimeOption<OwnedTensor<Vector<F, N>>>,
    at: usize,
    column: usize,
) -> Vector<f32, N> {
    let value = Vector::<f32, N>::cast_from(x[at]);
    #[comptime]
    match bias {
        ComptimeOption::Some(bias) => value + Vector::<f32, N>::cast_from(bias.as_slice()[column]),
        ComptimeOption::None => value,
    }
}
