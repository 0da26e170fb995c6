//! Expert capacity, which limits the number of tokens that each expert accepts from a rank.

use burn_megatron_kernels::moe::capacity::keep_within_capacity;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::routed_tokens::RankTokens;
use super::router::Routing;

/// Settings of the expert capacity: the maximum number of tokens that an expert accepts from a rank. The capacity is
/// `ceil(T k / E * factor)` for `T` real tokens of the rank, `k` experts per token and `E` experts. If more tokens
/// choose the expert, the expert drops the excess tokens. A dropped token has the weight 0 for this expert, and its
/// weights for other experts do not change.
///
/// Each rank selects the dropped tokens without communication.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Capacity {
    /// The capacity factor: the capacity divided by the number of tokens per expert under an even load.
    pub factor: f64,
    /// The policy that selects the tokens that an expert keeps.
    pub keep: KeepPolicy,
    /// Whether each rank sends the same number of rows to each expert. Rows of zeros then follow the rows of tokens,
    /// and tensor shapes do not depend on the routing. The number of rows is the capacity of a rank that has no padding
    /// tokens. This setting requires the all-to-all dispatcher, and a factor of at most `E / k`. With the factor
    /// `E / k`, an expert has enough rows for all tokens of the rank.
    #[serde(default)]
    pub pad: bool,
}

/// The policy that selects the tokens that an expert keeps if more tokens chose the expert than its capacity allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum KeepPolicy {
    /// Keeps the tokens with the largest weights. Tokens with equal weights are kept in token order.
    LargestWeights,
    /// Keeps the first tokens in token order.
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

    /// Returns the maximum number of tokens that an expert accepts if each of `tokens` tokens chooses `k` of `experts`
    /// experts. The result is at most `tokens`, because a token chooses an expert only once.
    ///
    /// ```
    /// use burn_megatron::nn::moe::{Capacity, KeepPolicy};
    ///
    /// let capacity = Capacity { factor: 1.5, keep: KeepPolicy::LargestWeights, pad: false };
    /// // 8 tokens choose 2 of 4 experts each. With an even load each expert gets 4 tokens.
    /// assert_eq!(capacity.of(8, 2, 4), 6);
    /// ```
    pub fn of(&self, tokens: usize, k: usize, experts: usize) -> usize {
        let share = (tokens as f64 * k as f64 / experts as f64 * self.factor).ceil();
        (share as usize).min(tokens)
    }

    /// Returns the routing without the dropped choices. No data is copied to the host.
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
