//! Reference implementations of matrix multiplications, composed of Burn's own operations.

use burn::tensor::Tensor;

use crate::cpu::wide;
use crate::flat::composed::accumulate;

/// Computes [`linear`](super::linear) with Burn's operations.
pub fn linear(x: Tensor<2>, weight: Tensor<2>, bias: Option<Tensor<1>>) -> Tensor<2> {
    let (dtype, own) = (x.dtype(), wide(x.dtype()));
    let product = x.cast(own).matmul(weight.cast(own));
    let sum = match bias {
        Some(bias) => product + bias.cast(own).unsqueeze::<2>(),
        None => product,
    };
    sum.cast(dtype)
}

/// Computes [`accumulate_weight_gradient`](super::accumulate_weight_gradient) with Burn's
/// operations.
pub fn accumulate_weight_gradient(x: Tensor<2>, gradient: Tensor<2>, into: Tensor<2>) -> Tensor<2> {
    let own = into.dtype();
    into + x.cast(own).transpose().matmul(gradient.cast(own))
}

/// Computes [`accumulate_weight_gradient_at`](super::accumulate_weight_gradient_at) with Burn's
/// operations.
pub fn accumulate_weight_gradient_at(
    x: Tensor<2>,
    gradient: Tensor<2>,
    flat: Tensor<1>,
    offset: usize,
    add: bool,
) -> Tensor<1> {
    let own = flat.dtype();
    let count = x.dims()[1] * gradient.dims()[1];
    if count == 0 {
        return flat;
    }
    let product = x.cast(own).transpose().matmul(gradient.cast(own));
    accumulate(flat, offset, product.reshape([count]), add)
}
