//! What a run can fail with.

use super::config::ConfigError;
use crate::checkpoint::state::StateError;
use crate::comm::CommError;
use crate::data::DataError;
use crate::data_parallel::DataParallelError;
use crate::generate::GenerateError;
use crate::optim::{OptimizerError, TooManySkips};
use crate::pipeline::engine::EngineError;

/// What a run can fail with.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The settings.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The data.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The gradients.
    #[error(transparent)]
    DataParallel(#[from] DataParallelError),
    /// The optimizer.
    #[error(transparent)]
    Optimizer(#[from] OptimizerError),
    /// No step is taken any more.
    #[error(transparent)]
    Skips(#[from] TooManySkips),
    /// No step is taken any more, as the loss is not finite.
    #[error("training diverged at step {}, from which on no loss is finite: {skips}", .step + 1)]
    Diverged {
        /// The first of the steps without a finite loss, from 0.
        step: usize,
        /// How many there were.
        skips: TooManySkips,
    },
    /// The pipeline.
    #[error(transparent)]
    Pipeline(#[from] EngineError),
    /// A pipeline without a schedule.
    #[error("pipeline = {0}, and no schedule says in which order its ranks work")]
    NoSchedule(usize),
    /// A schedule for other micro-batches.
    #[error(
        "the schedule has {schedule} micro-batches, a rank of the data axis has {micro_batches}"
    )]
    MicroBatches {
        /// Those of the schedule.
        schedule: usize,
        /// Those of a step.
        micro_batches: usize,
    },
    /// The text that it writes.
    #[error(transparent)]
    Generate(#[from] GenerateError),
    /// The other ranks.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// Saving, and going on from what was saved.
    #[error(transparent)]
    State(#[from] StateError),
    /// The observer.
    #[error("{0}")]
    Observer(Box<dyn std::error::Error + Send + Sync>),
}
