//! The errors of training a `Learner` on several ranks.

use burn_megatron::checkpoint::CheckpointError;
use burn_megatron::checkpoint::state::StateError;
use burn_megatron::comm::{CommError, ParallelContextError};
use burn_megatron::data_parallel::{DataParallelError, ZeroStage};
use burn_megatron::optim::{LossScaleError, OptimizerError, TooManySkips};

/// The error of a rank during training. [`LearningResult::error`](burn::train::LearningResult) contains the error
/// message.
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
    /// A ZeRO stage above 0 requires an optimizer of this library, which can be sharded.
    #[error(
        "zero_stage = {0} requires an optimizer of this library, because Burn's Learner does not expose its own: add \
         .optimizer(..) or .element_wise(..) to the strategy, or use zero_stage = 0"
    )]
    RequiresOptimizer(ZeroStage),
    /// No parameter of the model requires a gradient.
    #[error(
        "no parameter of the model requires a gradient: build it on `device.autodiff()`, or call `model.train()`"
    )]
    NothingToTrain,
    /// The maximum gradient norm for clipping is not greater than 0.
    #[error("invalid clip = {0}: expected a norm above 0")]
    Clip(f64),
    /// The number of micro-batches per step is 0.
    #[error("invalid grads_accumulation = 0: expected at least 1")]
    NoMicroBatches,
    /// The model did not multiply the loss by the loss scale.
    #[error(
        "the loss scale is {0}, but the model's `TrainStep::step` did not apply it: call \
         `scale_loss(loss).backward()` there, or set no loss scale"
    )]
    LossNotScaled(f64),
    /// The learning rate scheduler has parameter groups, which an optimizer of this library does not support.
    #[error(
        "an optimizer of this library does not support a learning rate scheduler with groups: use the `groups` of the \
         optimizer, or the optimizer of Burn's Learner"
    )]
    LearningRateGroups,
    /// Sharded checkpoints require an optimizer whose state can be saved.
    #[error("sharded checkpoints require .optimizer(..): {0}")]
    NotSaved(&'static str),
    /// The run cannot resume from Burn's checkpoints, because they do not contain the state of a sharded optimizer.
    #[error(
        "resuming from epoch {0} requires .checkpoints(folder): Burn's checkpoints do not have the state of an optimizer of \
         this library"
    )]
    NotResumable(usize),
    /// There is no checkpoint for the requested epoch.
    #[error("no checkpoint of epoch {epoch} in {folder}: {found}")]
    NoEpoch {
        /// The requested epoch.
        epoch: usize,
        /// The folder of the checkpoints.
        folder: String,
        /// The epochs that have a checkpoint in the folder.
        found: String,
    },
    /// A training item could not be read from the data set.
    #[error("the data set failed: {0}")]
    Data(String),
    /// The process groups could not be created.
    #[error(transparent)]
    Context(#[from] ParallelContextError),
    /// The model could not be wrapped for data parallelism, or its gradients could not be reduced.
    #[error(transparent)]
    DataParallel(#[from] DataParallelError),
    /// The optimizer could not be created.
    #[error(transparent)]
    Optimizer(#[from] OptimizerError),
    /// The settings of the loss scale are invalid.
    #[error(transparent)]
    LossScale(#[from] LossScaleError),
    /// Too many consecutive steps were skipped because gradients were not finite.
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
