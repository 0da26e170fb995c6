//! The kinds of auxiliary losses of a router.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A kind of [`RouterLoss`](super::RouterLoss).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum RouterLossKind {
    /// Load balancing loss over the tokens of a micro-batch.
    Balance,
    /// Load balancing loss that is computed for each sequence and averaged over the sequences of the micro-batch
    /// (DeepSeek-V3).
    SequenceBalance,
    /// Load balancing loss over the micro-batches of all data ranks. It uses the mean load of the micro-batches of the
    /// step so far.
    GlobalBalance,
    /// Router z-loss: `coefficient * mean over t of (log sum over e of exp z_te)^2` (ST-MoE, arXiv:2202.08906).
    ZLoss,
}

/// Writes the name of the loss in recipes and metrics, such as `sequence-balance`.
impl fmt::Display for RouterLossKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}
