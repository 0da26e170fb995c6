//! The training loop, metrics and logging of burn-megatron.
//!
//! [`Trainer`] runs the training of one rank: micro-batches, backward, gradient reduction, clipping, optimizer and
//! evaluation. Techniques that change a step are [`hooks`]. The trainer reports its measurements to an [`Observer`]. An
//! observer can show the [`progress`], write [`metrics`] to a [`run_folder`] and draw a [`plot`].

mod build;
mod clock;
mod config;
mod error;
mod evaluate;
pub mod expert_metrics;
mod fit;
#[cfg(test)]
mod grid_tests;
pub mod hooks;
mod json_float;
mod json_lines;
mod losses;
pub mod metrics;
mod micro_batches;
mod module_state;
mod observer;
mod outcome;
pub mod plot;
mod position;
pub mod progress;
mod resume;
pub mod run_folder;
mod save;
pub mod schedule;
mod step;
mod trainer;

pub use build::PipelineConfig;
pub use config::{ConfigError, TrainConfig};
pub use error::TrainError;
pub use expert_metrics::{ExpertMetrics, LayerLoad};
pub use hooks::cuda_graphs::CudaGraphStats;
pub use hooks::replay::{MeanTime, ReplayCost, ReplayError, Verdict};
pub use hooks::{BatchWarmup, SequenceWarmup};
pub use module_state::load_module;
pub use observer::{NoopObserver, Observer, ObserverError, StepGradients};
pub use outcome::TrainOutcome;
pub use save::{SaveConfig, SavedCheckpoint, Saver};
pub use trainer::Trainer;

/// The items that most programs need.
pub mod prelude {
    pub use burn_megatron::prelude::*;
    pub use burn_megatron_data::TextData;

    pub use crate::{NoopObserver, TrainConfig, Trainer};
}
