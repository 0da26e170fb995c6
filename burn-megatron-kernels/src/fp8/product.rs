//! Products of quantised matrices.

use burn::tensor::{DType, FloatDType, Tensor};

use super::{Fp8Matrix, dequantize};
use crate::{flat, gemm};

/// `a b^T + bias`: `[m, depth]` and `[n, depth]` to `[m, n]` in `dtype`. Sums are made in f32, and
/// the bias `[n]` is added before they are rounded.
pub fn multiply(
    a: &Fp8Matrix,
    b: &Fp8Matrix,
    bias: Option<Tensor<1>>,
    dtype: FloatDType,
) -> Tensor<2> {
    let bias = bias.map(|bias| bias.cast(FloatDType::F32));
    gemm::linear(dequantize(a), dequantize(b).transpose(), bias).cast(dtype)
}

/// `flat` with `a b^T`, row by row, over its elements from `offset` on, or added to them; see
/// [`gemm::accumulate_weight_gradient_at`].
pub fn accumulate_at(
    a: &Fp8Matrix,
    b: &Fp8Matrix,
    flat: Tensor<1>,
    offset: usize,
    add: bool,
) -> Tensor<1> {
    let (a, b) = (dequantize(a).transpose(), dequantize(b).transpose());
    if flat.dtype() == DType::F32 {
        return gemm::accumulate_weight_gradient_at(a, b, flat, offset, add);
    }
    let product = gemm::linear(a.transpose(), b, None);
    let len = product.shape().num_elements();
    let values = product.reshape([len]).cast(FloatDType::from(flat.dtype()));
    flat::accumulate(flat, offset, values, add)
}
