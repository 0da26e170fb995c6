//! Computes expert scores on the CPU.

use super::{SMALLEST_SUM, ScoreFunction};
use crate::cpu::Real;

/// The values that scores with a common denominator share.
#[derive(Clone, Copy, Debug)]
pub(in crate::moe) struct Denominator<W> {
    /// The largest logit. Only a softmax uses it.
    pub largest: W,
    /// The sum of the numerators.
    pub total: W,
}

impl<W: Real> Denominator<W> {
    /// Computes the denominator of these logits.
    #[inline(always)]
    pub fn of(score: ScoreFunction, logits: impl Iterator<Item = W> + Clone) -> Self {
        let largest = match score.is_softmax() {
            true => logits.clone().fold(W::NEG_INFINITY, W::larger),
            false => W::ZERO,
        };
        let sum: W = logits.map(|z| numerator(score, z, largest)).sum();
        let total = match score.is_softmax() {
            true => sum,
            false => sum + W::of(SMALLEST_SUM),
        };
        Self { largest, total }
    }

    /// Returns the denominator 1, for scores that are not divided.
    pub fn one() -> Self {
        Self {
            largest: W::ZERO,
            total: W::ONE,
        }
    }

    /// Returns the score of a logit.
    #[inline(always)]
    pub fn score(&self, score: ScoreFunction, z: W) -> W {
        numerator(score, z, self.largest) / self.total
    }

    /// Returns the derivative of a score with respect to its logit, for a fixed denominator.
    #[inline(always)]
    pub fn slope(&self, score: ScoreFunction, z: W) -> W {
        slope(score, z, self.largest) / self.total
    }
}

/// Returns the score before it is divided by the denominator.
#[inline(always)]
fn numerator<W: Real>(score: ScoreFunction, z: W, largest: W) -> W {
    match score {
        ScoreFunction::Softmax | ScoreFunction::PreSoftmax => (z - largest).exponential(),
        ScoreFunction::Sigmoid => sigmoid(z),
        ScoreFunction::SqrtSoftplus => {
            let positive = if z > W::ZERO { z } else { W::ZERO };
            (positive + ln_1p((-z.magnitude()).exponential())).root()
        }
    }
}

/// Returns the derivative of [`numerator`].
#[inline(always)]
fn slope<W: Real>(score: ScoreFunction, z: W, largest: W) -> W {
    match score {
        ScoreFunction::Softmax | ScoreFunction::PreSoftmax => (z - largest).exponential(),
        ScoreFunction::Sigmoid => sigmoid(z) * sigmoid(-z),
        ScoreFunction::SqrtSoftplus => {
            let root = numerator(score, z, largest);
            // For very negative logits, both the sigmoid and the square root underflow to 0.
            if root == W::ZERO {
                W::ZERO
            } else {
                sigmoid(z) / (root + root)
            }
        }
    }
}

/// Returns the sigmoid. The argument of the exponential is negative, so that it never overflows.
#[inline(always)]
fn sigmoid<W: Real>(z: W) -> W {
    let e = (-z.magnitude()).exponential();
    let larger = W::ONE / (W::ONE + e);
    if z < W::ZERO { e * larger } else { larger }
}

/// Returns `ln(1 + x)` for `x` from 0 to 1. The function corrects the rounding error of the sum `1 + x`.
#[inline(always)]
fn ln_1p<W: Real>(x: W) -> W {
    let sum = W::ONE + x;
    if sum == W::ONE {
        x
    } else {
        sum.logarithm() * x / (sum - W::ONE)
    }
}
