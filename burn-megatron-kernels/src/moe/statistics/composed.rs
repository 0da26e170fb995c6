//! Reference implementations of the sums over tokens, composed of Burn's own operations.

use burn::tensor::{Bool, Tensor, activation};

use super::{ScoreFunction, check_sequences, check_valid};
use crate::cpu::wide;
use crate::error::accept;

/// Computes [`super::sum_scores`] with Burn's operations and Burn's autodiff.
///
/// # Panics
///
/// Panics in the same cases as [`super::sum_scores`].
pub fn sum_scores(
    logits: Tensor<2>,
    score: ScoreFunction,
    sequences: usize,
    valid: Option<Tensor<1, Bool>>,
) -> Tensor<2> {
    let [tokens, experts] = logits.dims();
    accept(check_sequences(tokens, sequences));
    accept(check_valid(valid.as_ref(), tokens));
    let logits = logits.clone().cast(wide(logits.dtype()));
    let divided = |scores: Tensor<2>| scores.clone() / scores.sum_dim(1).add_scalar(1e-20);
    let scores = match score {
        ScoreFunction::Softmax | ScoreFunction::PreSoftmax => activation::softmax(logits, 1),
        ScoreFunction::Sigmoid => divided(activation::sigmoid(logits)),
        ScoreFunction::SqrtSoftplus => divided(logits.exp().add_scalar(1.0).log().sqrt()),
    };
    let scores = of_valid(scores, valid);
    let scores = scores.reshape([sequences, tokens / sequences, experts]);
    scores.sum_dim(1).reshape([sequences, experts])
}

/// Computes [`super::sum_squared_lse`] with Burn's operations and Burn's autodiff.
///
/// # Panics
///
/// Panics in the same cases as [`super::sum_squared_lse`].
pub fn sum_squared_lse(logits: Tensor<2>, valid: Option<Tensor<1, Bool>>) -> Tensor<1> {
    accept(check_valid(valid.as_ref(), logits.dims()[0]));
    let logits = logits.clone().cast(wide(logits.dtype()));
    let largest = logits.clone().detach().max_dim(1);
    let lse = (logits - largest.clone()).exp().sum_dim(1).log() + largest;
    of_valid(lse.clone() * lse, valid).sum()
}

fn of_valid(values: Tensor<2>, valid: Option<Tensor<1, Bool>>) -> Tensor<2> {
    match valid {
        Some(valid) => {
            let shape = values.dims();
            let hidden = valid.bool_not().unsqueeze_dim::<2>(1).expand(shape);
            values.mask_fill(hidden, 0.0)
        }
        None => values,
    }
}
