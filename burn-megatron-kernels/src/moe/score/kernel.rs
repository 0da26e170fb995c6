//! Computes expert scores in CubeCL kernels, with the same formulas as on the CPU.

use cubecl::prelude::*;

use super::{SMALLEST_SUM, ScoreFunction};

/// Returns whether the score is a softmax. Kernels can call this function.
pub(in crate::moe) const fn is_softmax(score: ScoreFunction) -> bool {
    matches!(score, ScoreFunction::Softmax | ScoreFunction::PreSoftmax)
}

/// Returns the number that is added to a sum of numerators to keep it above 0.
pub(in crate::moe) const fn least(score: ScoreFunction) -> f32 {
    if is_softmax(score) {
        0.0
    } else {
        SMALLEST_SUM as f32
    }
}

/// Returns the score before it is divided by the denominator. `largest` is the largest logit, which only a softmax
/// uses.
#[cube]
pub(in crate::moe) fn numerator(z: f32, largest: f32, #[comptime] score: ScoreFunction) -> f32 {
    match comptime!(score) {
        ScoreFunction::Softmax => (z - largest).exp(),
        ScoreFunction::PreSoftmax => (z - largest).exp(),
        ScoreFunction::Sigmoid => sigmoid(z),
        ScoreFunction::SqrtSoftplus => {
            let e = (-z.abs()).exp();
            (max(z, 0.0f32) + ln_1p(e)).sqrt()
        }
    }
}

/// Returns the derivative of [`numerator`].
#[cube]
pub(in crate::moe) fn slope(z: f32, largest: f32, #[comptime] score: ScoreFunction) -> f32 {
    match comptime!(score) {
        ScoreFunction::Softmax => (z - largest).exp(),
        ScoreFunction::PreSoftmax => (z - largest).exp(),
        ScoreFunction::Sigmoid => sigmoid(z) * sigmoid(-z),
        ScoreFunction::SqrtSoftplus => {
            let root = numerator(z, largest, score);
            // For very negative logits, both the sigmoid and the square root underflow to 0.
            let safe = select(root == 0.0f32, 1.0f32, root);
            select(root == 0.0f32, 0.0f32, sigmoid(z) / (safe + safe))
        }
    }
}

/// Returns the sigmoid. The argument of the exponential is negative, so that it never overflows.
#[cube]
fn sigmoid(z: f32) -> f32 {
    let e = (-z.abs()).exp();
    let larger = 1.0f32 / (1.0f32 + e);
    select(z < 0.0f32, e * larger, larger)
}

/// Returns `ln(1 + x)` for `x` from 0 to 1. The function corrects the rounding error of the sum `1 + x`.
#[cube]
fn ln_1p(x: f32) -> f32 {
    let sum = 1.0f32 + x;
    let rounded = sum - 1.0f32;
    let safe = select(rounded == 0.0f32, 1.0f32, rounded);
    select(rounded == 0.0f32, x, sum.ln() * x / safe)
}
