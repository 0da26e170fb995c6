//! The optimizer over a table of parameters: AdamW or any element-wise optimizer of Burn, groups of
//! parameters, the global gradient norm, loss scaling.

use serde::{Deserialize, Serialize};

use crate::comm::CommError;

mod adamw;
mod element_wise;
pub mod groups;
mod loss_scale;
mod multipliers;
mod norm;
mod skip;
#[cfg(test)]
mod tests;

pub use adamw::ParallelAdamW;
pub use element_wise::ElementWise;
pub use groups::{GlobFault, GroupError, Multipliers, ParameterGroup};
pub use loss_scale::{
    LossScale, LossScaleConfig, LossScaleError, LossScaler, LossScalerState, ScaleChange,
};
pub use norm::{all_finite, count_zeros, global_norm};
pub use skip::{StepCount, TooManySkips};

/// Settings of AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdamWConfig {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Decoupled decay of weights; norms and biases have none (see
    /// [`ParameterEntry::decay`](crate::nn::ParameterEntry::decay)), unless a group says otherwise.
    pub weight_decay: f64,
    /// Parameters whose decay or learning rate is another one, by the patterns of their paths.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<ParameterGroup>,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        Self {
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
            groups: vec![],
        }
    }
}

/// An optimizer that cannot be built.
#[derive(Clone, Debug, thiserror::Error)]
pub enum OptimizerError {
    /// A group of parameters is not right.
    #[error(transparent)]
    Group(#[from] GroupError),
    /// Moments in 16 bits, of an optimizer that keeps them in the type of the masters.
    #[error(
        "moments = bf16 is what the fused AdamW can keep, and the optimizer of this run is unfused; \
         fuse it, or leave moments at f32"
    )]
    Moments,
    /// The ranks could not communicate.
    #[error(transparent)]
    Comm(Box<CommError>),
}
