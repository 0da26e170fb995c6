//! Errors of training on many ranks.

use burn_megatron::checkpoint::CheckpointError;
use burn_megatron::checkpoint::state::StateError;
use burn_megatron::comm::{CommError, ParallelContextError};
use burn_megatron::data_parallel::{DataParallelError, ZeroStage};
use burn_megatron::optim::{LossScaleError, OptimizerError, TooManySkips};

/// An error of a rank. [`LearningResult::error`](burn::train::LearningResult) contains its text.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LearnerError {
    /// There are fewer training items than ranks.
    #[error(
        "the training data have {items} items for {ranks} ranks: expected at least one for each"
    )]
    TooFewItems {
        /// The number of training items.
        items: usize,
        /// The number of ranks.
        ranks: usize,
    },
    /// Sharding requires an optimizer that can be sharded.
    #[error(
        "zero_stage = {0} requires an optimizer of this library, because Burn's Learner does not expose its own: add \
         .optimizer(..) or .element_wise(..) to the strategy, or use zero_stage = 0"
    )]
    RequiresOptimizer(ZeroStage),
    /// No parameter is trained.
    #[error(
        "no parameter of the model requires a gradient: build it on `device.autodiff()`, or call `model.train()`"
    )]
    NothingToTrain,
    /// The clipping norm must be above zero.
    #[error("invalid clip = {0}: expected a norm above 0")]
    Clip(f64),
    /// A step must have at least one micro-batch.
    #[error("invalid grads_accumulation = 0: expected at least 1")]
    NoMicroBatches,
    /// The model did not apply the loss scale.
    #[error(
        "the loss scale is {0}, but the model's `TrainStep::step` did not apply it: call \
         `scale_loss(loss).backward()` there, or set no loss scale"
    )]
    LossNotScaled(f64),
    /// A schedule with parameter groups conflicts with an optimizer of this library.
    #[error(
        "an optimizer of this library does not support a learning rate scheduler with groups: use the `groups` of the \
         optimizer, or the optimizer of Burn's Learner"
    )]
    LearningRateGroups,
    /// Sharded checkpoints require an optimizer that can save its state.
    #[error("checkpoints in shards require .optimizer(..): {0}")]
    NotSaved(&'static str),
    /// Burn's checkpoints do not contain the state of a sharded optimizer.
    #[error(
        "resuming from epoch {0} requires .checkpoints(folder): Burn's checkpoints do not have the state of an optimizer of \
         this library"
    )]
    NotResumable(usize),
    /// There is no checkpoint of this epoch.
    #[error("no checkpoint of epoch {epoch} in {folder}: {found}")]
    NoEpoch {
        /// The epoch.
        epoch: usize,
        /// The folder.
        folder: String,
        /// The epochs that were found.
        found: String,
    },
    /// An error of the data set.
    #[error("the data set failed: {0}")]
    Data(String),
    /// The groups of the ranks could not be made.
    #[error(transparent)]
    Context(#[from] ParallelContextError),
    /// The model could not be wrapped, or its gradients could not be reduced.
    #[error(transparent)]
    DataParallel(#[from] DataParallelError),
    /// The optimizer could not be built.
    #[error(transparent)]
    Optimizer(#[from] OptimizerError),
    /// An invalid loss scale.
    #[error(transparent)]
    LossScale(#[from] LossScaleError),
    /// Too many consecutive steps were skipped.
    #[error(transparent)]
    Skips(#[from] TooManySkips),
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// A checkpoint could not be written or read.
    #[error(transparent)]
    State(#[from] StateError),
    /// A checkpoint could not be opened.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
}
