//! The reference implementation of the router weights, composed of Burn's own operations.

use burn::tensor::{Int, Tensor, activation};

use super::{RouterOptions, ScoreFunction, check_indices};
use crate::cpu::wide;
use crate::error::accept;

/// Computes [`super::router_weights`] with Burn's operations and Burn's autodiff. All indices must be valid experts.
///
/// # Panics
///
/// Panics in the same cases as [`super::router_weights`].
pub fn router_weights(
    logits: Tensor<2>,
    indices: Tensor<2, Int>,
    options: &RouterOptions,
) -> Tensor<2> {
    let [tokens, experts] = logits.dims();
    accept(options.check(experts));
    accept(check_indices(indices.dims(), [tokens, options.top_k]));
    let logits = logits.clone().cast(wide(logits.dtype()));
    let chosen = |scores: Tensor<2>| scores.gather(1, indices);
    let divided = |scores: Tensor<2>| match options.normalizes() {
        false => scores,
        true => scores.clone() / scores.sum_dim(1).add_scalar(1e-20),
    };
    let weights = match options.score {
        ScoreFunction::Softmax => activation::softmax(chosen(logits), 1),
        ScoreFunction::PreSoftmax => chosen(activation::softmax(logits, 1)),
        ScoreFunction::Sigmoid => divided(activation::sigmoid(chosen(logits))),
        ScoreFunction::SqrtSoftplus => divided(chosen(logits).exp().add_scalar(1.0).log().sqrt()),
    };
    weights.mul_scalar(options.scaling_factor)
}
