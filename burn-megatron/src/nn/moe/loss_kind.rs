//! The kinds of losses of a router.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A kind of [`RouterLoss`](super::RouterLoss).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum RouterLossKind {
    /// The balance of a micro-batch.
    Balance,
    /// The balance of each sequence, averaged over the sequences of the micro-batch (DeepSeek-V3).
    SequenceBalance,
    /// The balance of the micro-batches of all data ranks, with the mean load of those so far in the step.
    GlobalBalance,
    /// `coefficient * mean over t of (log sum over e of exp z_te)^2` (ST-MoE, arXiv:2202.08906).
    ZLoss,
}

/// Its name in a recipe and in metrics: `sequence-balance`.
impl fmt::Display for RouterLossKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}
