//! The sharded optimizer: AdamW or any element-wise optimizer of Burn, parameter groups, the global gradient
//! norm, loss scaling.

use serde::{Deserialize, Serialize};

use crate::comm::CommError;

mod adamw;
mod element_wise;
mod group_segments;
pub mod groups;
mod loss_scale;
mod norm;
mod step_count;
mod step_statistics;
#[cfg(test)]
mod tests;

pub use adamw::ParallelAdamW;
pub use element_wise::ElementWise;
pub use groups::{GlobError, GroupError, Multipliers, ParameterGroup};
pub use loss_scale::{
    LossScale, LossScaleConfig, LossScaleError, LossScaler, LossScalerState, ScaleChange,
};
pub use norm::{all_finite, count_zeros, global_norm};
pub use step_count::{StepCount, TooManySkips};
pub(crate) use step_statistics::{
    OutcomeSettings, RankStatistics, StepReading, StepStatistics, order_of_squares,
};

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
    /// Decoupled weight decay; none for norms and biases (see
    /// [`ParameterEntry::decay`](crate::nn::ParameterEntry::decay)), unless a group sets it.
    pub weight_decay: f64,
    /// Parameters with another weight decay or learning rate, selected by path patterns.
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
    /// Checks the settings, in the f32 in which moments are computed, and the groups.
    ///
    /// # Errors
    ///
    /// [`OptimizerError::Setting`] for the first setting out of its range, [`OptimizerError::Group`] for the
    /// first invalid group.
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

/// Why an optimizer cannot be built.
#[derive(Clone, Debug, thiserror::Error)]
pub enum OptimizerError {
    /// A setting out of its range.
    #[error("invalid optimizer setting {name} = {value}: expected {fits} in 32 bits")]
    Setting {
        /// The setting.
        name: &'static str,
        /// Its value.
        value: f64,
        /// The valid range.
        fits: &'static str,
    },
    /// An invalid parameter group.
    #[error(transparent)]
    Group(#[from] GroupError),
    /// 16-bit moments for an optimizer that stores them in the dtype of the masters.
    #[error(
        "moments = bf16 requires the fused AdamW, but the optimizer of this run is unfused; fuse it, or use \
         moments = f32"
    )]
    Moments,
    /// State on the host for an optimizer that is stepped on the device.
    #[error(
        "offload.optimizer = {0} requires the fused AdamW, which steps a bucket at once on the device or the host, but \
         the optimizer of this run is unfused; fuse it, or use offload.optimizer = 0"
    )]
    Offload(f64),
    /// A collective failed.
    #[error(transparent)]
    Comm(Box<CommError>),
}
