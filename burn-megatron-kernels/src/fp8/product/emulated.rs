//! Products in f32 of what the codes say.

use burn::tensor::{DType, FloatDType, Tensor};

use super::bring;
use crate::fp8::{Fp8Matrix, dequantize};
use crate::gemm;

/// See [`multiply`](super::multiply).
pub(super) fn multiply(
    a: &Fp8Matrix,
    b: &Fp8Matrix,
    bias: Option<Tensor<1>>,
    dtype: FloatDType,
) -> Tensor<2> {
    let bias = bias.map(|bias| bias.cast(FloatDType::F32));
    gemm::linear(dequantize(a), dequantize(b).transpose(), bias).cast(dtype)
}

/// See [`accumulate_at`](super::accumulate_at).
pub(super) fn accumulate_at(
    a: &Fp8Matrix,
    b: &Fp8Matrix,
    flat: Tensor<1>,
    offset: usize,
    add: bool,
) -> Tensor<1> {
    if flat.dtype() == DType::F32 {
        let (a, b) = (dequantize(a).transpose(), dequantize(b).transpose());
        return gemm::accumulate_weight_gradient_at(a, b, flat, offset, add);
    }
    bring(multiply(a, b, None, FloatDType::F32), flat, offset, add)
}
