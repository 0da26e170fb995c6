//! The reference implementation of grouped matrix multiplication, composed of Burn's own operations.

use burn::tensor::Tensor;

use super::{NAME, check, groups};
use crate::error::{accept, check_same_type};

/// Computes [`super::grouped_matmul`] with one matrix multiplication per expert and Burn's autodiff.
///
/// # Panics
///
/// Panics in the same cases as [`super::grouped_matmul`].
pub fn grouped_matmul(x: Tensor<2>, weights: Tensor<3>, group_sizes: &[usize]) -> Tensor<2> {
    accept(check(x.dims(), weights.dims(), group_sizes));
    let of_weights = "type of the weights";
    accept(check_same_type(
        NAME,
        x.dtype(),
        of_weights,
        weights.dtype(),
    ));
    let product = |(expert, first, size)| {
        let weight = weights.clone().narrow(0, expert, 1).squeeze_dim::<2>(0);
        x.clone().narrow(0, first, size).matmul(weight)
    };
    let some = groups(group_sizes).filter(|(_, _, size)| *size > 0);
    let parts: Vec<_> = some.map(product).collect();
    if parts.is_empty() {
        let [_, _, outputs] = weights.dims();
        return Tensor::zeros([0, outputs], (&x.device(), x.dtype()));
    }
    Tensor::cat(parts, 0)
}
