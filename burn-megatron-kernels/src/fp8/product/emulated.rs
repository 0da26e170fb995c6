//! FP8 matrix multiplication that decodes its operands. It computes in f32, or in f64 if the result is f64.

use burn::tensor::{DType, Tensor};

use super::store_flat;
use crate::cpu::wide;
use crate::fp8::matrix::Fp8Matrix;
use crate::fp8::quantize::dequantize;
use crate::gemm;

/// Multiplies two matrices. See [`multiply`](super::multiply).
pub(super) fn multiply(
    a: &Fp8Matrix,
    b: &Fp8Matrix,
    bias: Option<Tensor<1>>,
    dtype: DType,
) -> Tensor<2> {
    // Sums in f64 represent nearly every product of codes exactly. Therefore their order does not change the 8-bit
    // input of the next layer.
    let sums = wide(dtype);
    let bias = bias.map(|bias| bias.cast(sums));
    let [a, b] = [a, b].map(|factor| dequantize(factor).cast(sums));
    gemm::linear(a, b.transpose(), bias).cast(dtype)
}

/// Multiplies two matrices and accumulates into a buffer. See [`accumulate_at`](super::accumulate_at).
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
    let sums = wide(flat.dtype());
    store_flat(multiply(a, b, None, sums), flat, offset, add)
}
