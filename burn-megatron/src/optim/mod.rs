//! The sharded optimizer: AdamW, Muon, or any element-wise optimizer of Burn; parameter groups, the global gradient
//! norm, loss scaling.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::comm::CommError;

mod adamw;
mod average;
mod config;
mod element_wise;
mod group_segments;
pub mod groups;
mod logit_clip;
mod loss_scale;
mod muon;
mod norm;
mod parallel;
mod rules;
mod spikes;
mod state;
mod step_count;
mod step_statistics;
#[cfg(test)]
mod tests;

pub use adamw::ParallelAdamW;
pub use average::{EMA, EmaConfig, WeightAverage};
pub use config::OptimizerConfig;
pub use element_wise::ElementWise;
pub use groups::{GlobError, GroupError, GroupOptimizer, Multipliers, ParameterGroup};
pub use logit_clip::{QkClip, QkClipConfig, QkClipError};
pub use loss_scale::{
    LossScale, LossScaleConfig, LossScaleError, LossScaler, LossScalerState, ScaleChange,
};
pub use muon::{MuonConfig, MuonScale, ParallelMuon, orthogonalize};
pub use norm::{all_finite, count_zeros, global_norm};
pub use parallel::ParallelOptimizer;
pub use rules::{
    AdagradConfig, AdamConfig, AdanConfig, LionConfig, ResumableOptimizer, RmsPropConfig,
    SgdConfig, StateTensors,
};
pub use spikes::{SpikeConfig, SpikeWindow};
pub use state::{FIRST, SECOND};
pub use state::{OptimizerState, StateKind};
pub use step_count::{StepCount, TooManySkips};
pub use step_statistics::{
    OutcomeSettings, RankStatistics, StepReading, StepStatistics, order_of_squares,
};

/// Settings of AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AdamWConfig {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Decoupled weight decay; none for [norms and biases](crate::nn::ParameterEntry::decay), unless a group sets it.
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
        config::check(self.settings())?;
        Ok(groups::check(&self.groups)?)
    }

    fn settings(&self) -> Vec<config::Setting> {
        vec![
            config::beta("beta1", self.beta1),
            config::beta("beta2", self.beta2),
            config::above_zero("epsilon", self.epsilon),
            config::weight_decay(self.weight_decay),
        ]
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
    /// QK-Clip that cannot limit the logits of a model.
    #[error(transparent)]
    QkClip(#[from] QkClipError),
    /// Logits of a model without attention.
    #[error(
        "{setting} needs the logits of attention, and this model has no attention layer of this library; remove {setting}"
    )]
    NoAttention {
        /// The setting.
        setting: &'static str,
    },
    /// 16-bit moments for an optimizer that stores them in the dtype of the masters.
    #[error(
        "moments = bf16 requires the fused AdamW, but the optimizer of this run is another one, or unfused; fuse \
         AdamW, or use moments = f32"
    )]
    Moments,
    /// State on the host for an optimizer that is stepped on the device.
    #[error(
        "offload.optimizer = {0} requires the fused AdamW, which steps a bucket at once on the device or the host, but \
         the optimizer of this run is another one, or unfused; fuse AdamW, or use offload.optimizer = 0"
    )]
    Offload(f64),
    /// A collective failed.
    #[error(transparent)]
    Comm(Box<CommError>),
}
