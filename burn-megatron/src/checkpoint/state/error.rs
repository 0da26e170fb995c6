//! Errors of saving the state of a run and of resuming a run.

use burn::tensor::DType;

use crate::checkpoint::{CheckpointError, ElementType};
use crate::comm::CommError;
use crate::nn::fp8::Fp8Error;
use crate::optim::LossScaleError;

/// An error that occurred while the state of a run was saved or loaded.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// Reading or writing the checkpoint failed.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A tensor has a type whose values this run cannot represent exactly.
    #[error(
        "{key} is {found:?} in {of}, and {wanted:?} in this run, which cannot represent all its values; allow rounding \
         by name, or save the tensor in another type"
    )]
    Type {
        /// The name of the tensor source.
        of: String,
        /// The key of the tensor.
        key: String,
        /// The element type of the tensor in the source.
        found: ElementType,
        /// The element type of the tensor in this run.
        wanted: DType,
    },
    /// A tensor has a type that checkpoints do not support.
    #[error(
        "{key} is {found:?}, which checkpoints do not support; f32, f64, f16 and bf16 can be saved"
    )]
    UnsupportedType {
        /// The key of the tensor.
        key: String,
        /// The type of the tensor.
        found: DType,
    },
    /// A tensor could not be read from its device, or the source has too few bytes.
    #[error("{key} cannot be read: {reason}")]
    Unreadable {
        /// The key of the tensor.
        key: String,
        /// The cause.
        reason: String,
    },
    /// The run state in a checkpoint is invalid.
    #[error("invalid run state in {of}: {reason}")]
    InvalidRunState {
        /// The name of the checkpoint.
        of: String,
        /// The reason.
        reason: String,
    },
    /// The checkpoint was saved with another seed.
    #[error(
        "{of} was saved by a run with the seed {found}, and this run has the seed {wanted}: dropout and samples would \
         differ; set the same seed"
    )]
    Seed {
        /// The name of the checkpoint.
        of: String,
        /// The seed in the checkpoint.
        found: u64,
        /// The seed of this run.
        wanted: u64,
    },
    /// The run uses a dynamic loss scale, but the checkpoint has none.
    #[error("{of} has no loss scale, which this run needs; allow missing entries by name")]
    NoLossScale {
        /// The name of the checkpoint.
        of: String,
    },
    /// The loss scale is invalid.
    #[error(transparent)]
    LossScale(#[from] LossScaleError),
    /// The scales of the FP8 layers are invalid.
    #[error(transparent)]
    Fp8(#[from] Fp8Error),
    /// The trainer has no saver for checkpoints.
    #[error("the trainer has no saver: configure where and when it saves")]
    NoSaver,
    /// Another rank had an error, or several ranks had different errors.
    #[error("{}", reasons.iter().map(|(rank, reason)| format!("rank {rank}: {reason}")).collect::<Vec<_>>().join("; "))]
    Ranks {
        /// The ranks and their errors.
        reasons: Vec<(usize, String)>,
    },
    /// The background thread that writes a checkpoint panicked.
    #[error("the thread that writes step {step} panicked")]
    WriterPanicked {
        /// The step of the checkpoint.
        step: u64,
    },
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] CommError),
}
