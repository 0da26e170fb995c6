//! Expert capacity, which limits the number of tokens that each expert takes from a rank.

use burn_megatron_kernels::moe::capacity::keep_within_capacity;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::routed_tokens::RankTokens;
use super::router::Routing;

/// The maximum number of tokens that an expert takes from a rank: `ceil(T k / E * factor)` for `T` real tokens of the
/// rank, `k` experts per token and `E` experts. Other tokens are dropped: their weight for this expert is 0, and
/// their weights for other experts do not change.
///
/// Each rank decides without communication.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Capacity {
    /// The capacity as a multiple of an equal share of the tokens.
    pub factor: f64,
    /// The tokens that an expert keeps.
    pub keep: KeepPolicy,
    /// Whether each expert gets the same number of rows from each rank, with zero rows after the tokens. Shapes then
    /// do not depend on the routing. The number of rows is the capacity of a rank without padding. Requires the
    /// all-to-all dispatcher, and a factor of at most `E / k`. With the factor `E / k` an expert has a row for every
    /// token.
    #[serde(default)]
    pub pad: bool,
}

/// The tokens that an expert keeps if more tokens chose it than its capacity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum KeepPolicy {
    /// Keeps the tokens with the largest weights. Ties are resolved by token order.
    LargestWeights,
    /// Keeps the first tokens.
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

    /// Returns the maximum number of tokens that an expert takes from `tokens` tokens with `k` choices of `experts`
    /// experts. It is at most `tokens`, because a token chooses an expert only once.
    ///
    /// ```
    /// use burn_megatron::nn::moe::{Capacity, KeepPolicy};
    ///
    /// let capacity = Capacity { factor: 1.5, keep: KeepPolicy::LargestWeights, pad: false };
    /// // 8 tokens choose 2 of 4 experts: an equal share is 4 tokens per expert.
    /// assert_eq!(capacity.of(8, 2, 4), 6);
    /// ```
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
