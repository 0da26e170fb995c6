//! Sharded optimizers: AdamW, Muon, and any element-wise optimizer of Burn. The module also contains parameter groups,
//! the global gradient norm, QK-Clip and loss scaling. The main entry point is [`ParallelOptimizer`].

mod adamw;
mod average;
mod config;
mod element_wise;
mod error;
mod group_segments;
pub mod groups;
mod logit_clip;
mod loss_scale;
mod muon;
mod norm;
mod parallel;
mod rule_states;
mod rules;
mod setting;
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
pub use error::OptimizerError;
pub use groups::{GlobError, GroupError, GroupOptimizer, Multipliers, ParameterGroup};
pub use logit_clip::{QkClip, QkClipConfig, QkClipError};
pub use loss_scale::{
    LossScale, LossScaleConfig, LossScaleError, LossScaler, LossScalerState, ScaleChange,
};
pub use muon::{MuonConfig, MuonScale, ParallelMuon, orthogonalize};
pub use norm::{all_finite, count_zeros, global_norm};
pub use parallel::ParallelOptimizer;
pub use rule_states::{ResumableOptimizer, StateTensors};
pub use rules::{
    AdagradConfig, AdamConfig, AdamWConfig, AdanConfig, LionConfig, RmsPropConfig, SgdConfig,
};
pub use spikes::{SpikeConfig, SpikeWindow};
pub use state::{FIRST, OptimizerState, SECOND, StateKind};
pub use step_count::{StepCount, TooManySkips};
pub use step_statistics::{
    OutcomeSettings, RankStatistics, StepReading, StepStatistics, order_of_squares,
};
