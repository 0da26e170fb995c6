//! What going on from a checkpoint, and saving one, can fail with.

use burn::tensor::DType;

use crate::checkpoint::{CheckpointError, ElementType};
use crate::comm::CommError;
use crate::nn::fp8::Fp8Error;
use crate::optim::LossScaleError;

/// What going on from a checkpoint, and saving one, can fail with.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The files.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A tensor of another type, whose values this run cannot hold as they are.
    #[error(
        "{key} is {found:?} in {of}, and {wanted:?} in this run, which cannot hold every value of it; \
         allow rounding by name, or save it in another type"
    )]
    Type {
        /// The source.
        of: String,
        /// The tensor.
        key: String,
        /// Its type there.
        found: ElementType,
        /// Its type here.
        wanted: DType,
    },
    /// A tensor whose type no file has.
    #[error(
        "{key} is {found:?}, which no checkpoint can hold; f32, f64, f16 and bf16 can be saved"
    )]
    Unsaved {
        /// The tensor.
        key: String,
        /// Its type.
        found: DType,
    },
    /// A tensor that could not be read from its device, or a source that gave too few bytes.
    #[error("{key} cannot be read: {reason}")]
    Unreadable {
        /// The tensor.
        key: String,
        /// Why not.
        reason: String,
    },
    /// What a run remembers cannot be understood.
    #[error("the state of the run in {of} cannot be understood: {reason}")]
    Run {
        /// The checkpoint.
        of: String,
        /// What is wrong.
        reason: String,
    },
    /// Another seed.
    #[error(
        "{of} was saved by a run with the seed {found}, and this one has {wanted}: dropout and samples \
         would be others; give the same seed"
    )]
    Seed {
        /// The checkpoint.
        of: String,
        /// Its seed.
        found: u64,
        /// The seed of this run.
        wanted: u64,
    },
    /// A run with a dynamic loss scale, and a checkpoint without.
    #[error(
        "{of} has no loss scale, and this run finds one by trying; allow what is missing by name"
    )]
    NoLossScale {
        /// The checkpoint.
        of: String,
    },
    /// The loss scale.
    #[error(transparent)]
    LossScale(#[from] LossScaleError),
    /// The scales of layers in 8 bits.
    #[error(transparent)]
    Fp8(#[from] Fp8Error),
    /// Nothing says where and when to save.
    #[error("nothing says where this run saves; give its trainer a saver")]
    NoSaver,
    /// Other ranks, where this one has nothing to complain about or something else.
    #[error("{}", reasons.iter().map(|(rank, reason)| format!("rank {rank}: {reason}")).collect::<Vec<_>>().join("; "))]
    Ranks {
        /// Ranks, each with what was wrong there.
        reasons: Vec<(usize, String)>,
    },
    /// The thread that writes in the background ended in a panic.
    #[error("the thread that wrote step {step} ended before its time")]
    Writer {
        /// The step that it saved.
        step: u64,
    },
    /// The other ranks.
    #[error(transparent)]
    Comm(#[from] CommError),
}
