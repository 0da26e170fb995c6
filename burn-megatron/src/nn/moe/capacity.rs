//! Capacity: the most tokens that each expert takes from a rank.

use burn_megatron_kernels::moe::capacity::keep_within_capacity;
use serde::{Deserialize, Serialize};

use super::router::{Routing, plain};

/// The most tokens of a rank for each expert: `ceil(T k / E * factor)`, for `T` tokens of the rank. Others are
/// dropped: their weights are 0 and those of their other experts stay as they are.
///
/// A rank needs no other to decide, so an expert takes at most this many tokens from each rank.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Capacity {
    /// The multiple of an equal share of the tokens.
    pub factor: f64,
    /// Which tokens an expert keeps.
    pub keep: KeepPolicy,
    /// Whether each expert gets exactly its capacity of each rank, with rows of zeros after the tokens, so that
    /// shapes do not depend on the routing. Needs the all-to-all dispatcher.
    #[serde(default)]
    pub pad: bool,
}

/// The tokens that an expert keeps if more than its capacity chose it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum KeepPolicy {
    /// Those with the largest weights; of equal ones the first.
    LargestWeights,
    /// The first.
    First,
}

impl Capacity {
    pub(super) fn check(&self) -> Result<(), String> {
        if self.factor.is_finite() && self.factor > 0.0 {
            return Ok(());
        }
        Err(format!(
            "invalid capacity factor = {}: expected a positive finite number",
            self.factor
        ))
    }

    /// The most of `tokens` tokens with `k` choices of `experts` experts.
    pub fn of(&self, tokens: usize, k: usize, experts: usize) -> usize {
        ((tokens * k) as f64 / experts as f64 * self.factor).ceil() as usize
    }

    /// The routing without the dropped choices. Nothing is copied to the host.
    pub(super) fn apply(&self, routing: Routing) -> Routing {
        let ([tokens, experts], [_, k]) = (routing.logits.dims(), routing.weights.dims());
        let capacity = self.of(tokens, k, experts);
        let weights = match self.keep {
            KeepPolicy::First => None,
            KeepPolicy::LargestWeights => Some(plain(routing.weights.clone())),
        };
        Routing {
            indices: keep_within_capacity(routing.indices, weights, experts, capacity),
            rows_per_expert: self.pad.then_some(capacity),
            ..routing
        }
    }
}
