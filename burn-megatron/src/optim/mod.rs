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

impl AdamWConfig {
    /// Finds the first setting that is out of its range, in the f32 that moments are computed in, or the
    /// first group that cannot be.
    ///
    /// # Errors
    ///
    /// [`OptimizerError::Setting`] names it, its value, and what fits; [`OptimizerError::Group`].
    pub fn check(&self) -> Result<(), OptimizerError> {
        let is_decay = |beta: f64| beta >= 0.0 && (beta as f32) < 1.0;
        let betas = "at least 0 and below 1";
        let settings = [
            ("beta1", self.beta1, is_decay(self.beta1), betas),
            ("beta2", self.beta2, is_decay(self.beta2), betas),
            (
                "epsilon",
                self.epsilon,
                self.epsilon as f32 > 0.0 && (self.epsilon as f32).is_finite(),
                "above 0 and finite",
            ),
            (
                "weight_decay",
                self.weight_decay,
                self.weight_decay >= 0.0 && (self.weight_decay as f32).is_finite(),
                "at least 0 and finite",
            ),
        ];
        if let Some((name, value, _, fits)) = settings.into_iter().find(|(_, _, fits, _)| !fits) {
            return Err(OptimizerError::Setting { name, value, fits });
        }
        Ok(groups::check(&self.groups)?)
    }
}

/// An optimizer that cannot be built.
#[derive(Clone, Debug, thiserror::Error)]
pub enum OptimizerError {
    /// A setting out of its range.
    #[error("optimizer: {name} = {value} makes no step; it must be {fits} in 32 bits")]
    Setting {
        /// The setting.
        name: &'static str,
        /// Its value.
        value: f64,
        /// What it must be.
        fits: &'static str,
    },
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
