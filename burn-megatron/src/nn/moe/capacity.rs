//! Expert capacity: limits the tokens that each expert takes from a rank.

use burn_megatron_kernels::moe::capacity::keep_within_capacity;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::routed_tokens::RankTokens;
use super::router::Routing;

/// The maximum number of tokens that an expert takes from a rank: `ceil(T k / E * factor)`, for `T` real tokens of the rank. Others are
/// dropped: their weights are 0 and those of their other experts stay as they are.
///
/// A rank needs no other to decide, so an expert takes at most this many tokens from each rank.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Capacity {
    /// The capacity factor: the capacity is this multiple of the mean number of tokens per expert.
    pub factor: f64,
    /// The tokens that an expert keeps.
    pub keep: KeepPolicy,
    /// Whether each expert receives the same number of rows from each rank, padded with zeros. Shapes then do not
    /// depend on the routing. The number of rows is the capacity of a rank without padding. Requires the all-to-all
    /// dispatcher, and a factor of at most `E / k`. With the factor `E / k` no token is dropped.
    #[serde(default)]
    pub pad: bool,
}

/// The tokens that an expert keeps if more than its capacity chose it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum KeepPolicy {
    /// The tokens with the largest weights. Equal weights are ranked by token index.
    LargestWeights,
    /// The first.
    First,
}

impl Capacity {
    pub(super) fn check(&self, k: usize, experts: usize) -> Result<(), String> {
        let factor = self.factor;
        if !(factor.is_finite() && factor > 0.0) {
            return Err(format!(
                "invalid capacity.factor = {factor}: expected a positive finite number"
            ));
        }
        let most = experts as f64 / k as f64;
        if self.pad && factor > most {
            return Err(format!(
                "invalid capacity.factor = {factor} with capacity.pad = true: expected at most experts / \
                 experts_per_token = {experts} / {k} = {most}, with which each expert has a row for every token; without \
                 pad no rows are added"
            ));
        }
        Ok(())
    }

    /// Returns the maximum number of tokens that an expert takes from `tokens` tokens with `k` choices of `experts` experts.
    /// It is at most `tokens`, as a token chooses an expert once.
    pub fn of(&self, tokens: usize, k: usize, experts: usize) -> usize {
        let share = (tokens as f64 * k as f64 / experts as f64 * self.factor).ceil();
        (share as usize).min(tokens)
    }

    /// Returns the routing without the dropped choices. Nothing is copied to the host.
    pub(super) fn apply(&self, routing: Routing, own: &RankTokens) -> Routing {
        let ([tokens, experts], [_, k]) = (routing.logits.dims(), routing.weights.dims());
        let capacity = self.of(own.count, k, experts);
        let weights = match self.keep {
            KeepPolicy::First => None,
            KeepPolicy::LargestWeights => Some(routing.weights.clone().inner()),
        };
        Routing {
            indices: keep_within_capacity(routing.indices, weights, experts, capacity),
            rows_per_expert: self.pad.then(|| self.of(tokens, k, experts)),
            ..routing
        }
    }
}
