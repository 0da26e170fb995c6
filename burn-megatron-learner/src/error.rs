//! Why a training on many ranks fails.

use burn_megatron::checkpoint::CheckpointError;
use burn_megatron::checkpoint::state::StateError;
use burn_megatron::comm::{CommError, ParallelContextError};
use burn_megatron::data_parallel::{DataParallelError, ZeroStage};
use burn_megatron::optim::{LossScaleError, OptimizerError, TooManySkips};

/// Why a rank fails. [`LearningResult::error`](burn::train::LearningResult) has the text.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LearnerError {
    /// Fewer items than ranks.
    #[error(
        "the training data have {items} items for {ranks} ranks: expected at least one for each"
    )]
    TooFewItems {
        /// The items of the training data.
        items: usize,
        /// The ranks.
        ranks: usize,
    },
    /// Sharding without an optimizer that can be sharded.
    #[error(
        "zero_stage = {0} requires an optimizer of this library, as Burn's Learner does not give away its own: add \
         .optimizer(..) or .element_wise(..) to the strategy, or use zero_stage = 0"
    )]
    RequiresOptimizer(ZeroStage),
    /// No parameter is trained.
    #[error(
        "no parameter of the model requires a gradient: build it on `device.autodiff()`, or call `model.train()`"
    )]
    NothingToTrain,
    /// A norm that is not above zero.
    #[error("invalid clip = {0}: expected a norm above 0")]
    Clip(f64),
    /// No micro-batch in a step.
    #[error("invalid grads_accumulation = 0: expected at least 1")]
    NoMicroBatches,
    /// A loss scale that was not applied.
    #[error(
        "the loss scale is {0}, but the model's `TrainStep::step` did not apply it: call \
         `scale_loss(loss).backward()` there, or set no loss scale"
    )]
    LossNotScaled(f64),
    /// A schedule by parameter group, with an optimizer that does not know the groups.
    #[error(
        "the learning rate scheduler has groups, which an optimizer of this library does not read: use the `groups` of \
         the optimizer, or that of the Learner"
    )]
    LearningRateGroups,
    /// Checkpoints in shards for an optimizer that cannot save its state.
    #[error("checkpoints in shards require .optimizer(..): {0}")]
    NotSaved(&'static str),
    /// A sharded optimizer is to be resumed from Burn's checkpoints, which do not have its state.
    #[error(
        "resuming from epoch {0} requires .checkpoints(folder): Burn's checkpoints do not have the state of an optimizer of \
         this library"
    )]
    NotResumable(usize),
    /// No checkpoint of this epoch.
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
    /// The model could not be wrapped, or its gradients not be reduced.
    #[error(transparent)]
    DataParallel(#[from] DataParallelError),
    /// The optimizer could not be built.
    #[error(transparent)]
    Optimizer(#[from] OptimizerError),
    /// An invalid loss scale.
    #[error(transparent)]
    LossScale(#[from] LossScaleError),
    /// Too many steps in a row were skipped.
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
