//! The optimizer over a table of parameters: AdamW, the global gradient norm, clipping.

use serde::{Deserialize, Serialize};

mod adamw;
mod norm;
#[cfg(test)]
mod tests;

pub use adamw::ParallelAdamW;
pub use norm::{all_finite, global_norm};

/// Settings of AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdamWConfig {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Decoupled decay of weights; norms and biases have none (see
    /// [`ParameterEntry::decay`](crate::nn::ParameterEntry::decay)).
    pub weight_decay: f64,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        Self {
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
        }
    }
}
