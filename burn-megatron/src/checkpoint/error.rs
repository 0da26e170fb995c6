//! Errors of saving and loading.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::TensorSlice;
use crate::comm::CommError;
use crate::data_parallel::format_bytes;

/// An error of saving or loading a checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// A file system operation failed.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// The operation.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Tensors of the model that the source does not have.
    #[error("{of} has no {}", keys.join(", "))]
    Missing {
        /// The source.
        of: String,
        /// The tensors.
        keys: Vec<String>,
    },
    /// Tensors of the source that the model does not have.
    #[error("{of} has {}, which the model does not have", keys.join(", "))]
    Unexpected {
        /// The source.
        of: String,
        /// The tensors.
        keys: Vec<String>,
    },
    /// A path where the command must not write.
    #[error("cannot write to {}: {what}; name another place", path.display())]
    Output {
        /// The place.
        path: PathBuf,
        /// The reason.
        what: String,
    },
    /// A tensor whose shape differs from the model's.
    #[error("{key} has the shape {found:?} in {of}, and {wanted:?} in the model")]
    Shape {
        /// The source.
        of: String,
        /// The tensor.
        key: String,
        /// Its shape in the source.
        found: Vec<usize>,
        /// Its shape in the model.
        wanted: Vec<usize>,
    },
    /// A slice that is not within its tensor.
    #[error("the slice {slice} of {key} is out of bounds: its shape is {shape:?}")]
    OutOfBounds {
        /// The tensor.
        key: String,
        /// Its shape.
        shape: Vec<usize>,
        /// The requested slice.
        slice: TensorSlice,
    },
    /// A file with invalid content.
    #[error("{}: {what}", path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// The reason.
        what: String,
    },
    /// A write failed, as on a full disk.
    #[error("cannot write {}: {source}; {} were to be written", path.display(), format_bytes(*total))]
    Write {
        /// The file.
        path: PathBuf,
        /// The size that the file should have, in bytes.
        total: u64,
        /// The cause.
        source: io::Error,
    },
    /// A manifest of an unsupported version of the format.
    #[error(
        "{} has version {found} of the format; this program reads version {known}", path.display()
    )]
    Version {
        /// The manifest.
        path: PathBuf,
        /// The version found.
        found: u64,
        /// The supported version.
        known: u64,
    },
    /// The newest checkpoint of a folder cannot be used now, but may be intact.
    #[error("cannot use the checkpoint of step {step}, which may be intact: {source}")]
    MayBeIntact {
        /// Its step.
        step: u64,
        /// The cause.
        source: Box<CheckpointError>,
    },
    /// The folder of a run that resumes from an earlier step has checkpoints of later steps.
    #[error(
        "{} has checkpoints of later steps than {step}: {}", path.display(),
        later.iter().map(u64::to_string).collect::<Vec<_>>().join(", ")
    )]
    LaterSteps {
        /// The folder.
        path: PathBuf,
        /// The step that the run resumes from.
        step: u64,
        /// The later steps.
        later: Vec<u64>,
    },
    /// Another run holds the lock of the folder.
    #[error(
        "{} is being written by {holder}: give this run another folder, or wait until that one ends",
        path.display()
    )]
    Locked {
        /// The folder.
        path: PathBuf,
        /// The process that holds the lock.
        holder: String,
    },
    /// A folder without a finished checkpoint.
    #[error("{} has no finished checkpoint{}", path.display(), also(there))]
    NoCheckpoint {
        /// The folder.
        path: PathBuf,
        /// Checkpoints that exist, although `latest` does not.
        there: Vec<String>,
    },
    /// The folder already has a checkpoint of this step.
    #[error("{} already has a checkpoint of step {step}: give another folder", path.display())]
    Exists {
        /// The folder.
        path: PathBuf,
        /// The step.
        step: u64,
    },
    /// Two shards overlap.
    #[error("{key}: the element {element:?} was saved twice, in {first} and in {second}")]
    Overlap {
        /// The tensor.
        key: String,
        /// One shard.
        first: TensorSlice,
        /// The other shard.
        second: TensorSlice,
        /// The first element that is in both.
        element: Vec<usize>,
    },
    /// An element is in no shard.
    #[error("{key}: the element {element:?} was not saved")]
    Gap {
        /// The tensor.
        key: String,
        /// The first such element.
        element: Vec<usize>,
    },
    /// Ranks declared a tensor differently.
    #[error("{key} is {first} on one rank and {second} on another")]
    Mismatch {
        /// The tensor.
        key: String,
        /// Its type and shape on one rank.
        first: String,
        /// Its type and shape on the other.
        second: String,
    },
    /// A key was saved more than once.
    #[error("{key} was saved twice")]
    Duplicate {
        /// The object or the shard.
        key: String,
    },
    /// A tensor whose size in bytes overflows.
    #[error("{key} cannot have the shape {shape:?}: its size in bytes overflows 64 bits")]
    TooLarge {
        /// The tensor.
        key: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// Data whose size is not that of its slice.
    #[error("{key} has {wanted} bytes in {slice}, but {found} were given")]
    Length {
        /// The tensor.
        key: String,
        /// The slice.
        slice: TensorSlice,
        /// The bytes given.
        found: usize,
        /// The bytes of the slice.
        wanted: usize,
    },
    /// A chunk does not match its checksum.
    #[error(
        "{}: chunk {chunk} of {chunks} of {key} has changed since it was written", path.display()
    )]
    Checksum {
        /// The file.
        path: PathBuf,
        /// The tensor with its slice, or the object.
        key: String,
        /// The number of the chunk, from 1.
        chunk: usize,
        /// The number of chunks, of 4 MiB each.
        chunks: usize,
    },
    /// A rank could not write its part.
    #[error("rank {rank} could not write its part of the checkpoint: {reason}")]
    RankFailed {
        /// The rank.
        rank: usize,
        /// The reason that it reported.
        reason: String,
    },
    /// Ranks did not write their parts before the deadline.
    #[error(
        "no part of the checkpoint from rank {} after {:.0} s", list(ranks), waited.as_secs_f64()
    )]
    Timeout {
        /// The missing ranks.
        ranks: Vec<usize>,
        /// The time waited.
        waited: Duration,
    },
    /// The new checkpoint is saved, but an older one could not be removed.
    #[error("{} is saved, but an older checkpoint could not be removed: {source}", path.display())]
    Leftover {
        /// The new checkpoint.
        path: PathBuf,
        /// The cause.
        source: Box<CheckpointError>,
    },
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] CommError),
}

fn also(there: &[String]) -> String {
    match there {
        [] => String::new(),
        there => format!(
            ", but {} can be opened by name: `latest`, which names the newest one, is missing",
            there.join(", ")
        ),
    }
}

fn list(ranks: &[usize]) -> String {
    let ranks: Vec<_> = ranks.iter().map(usize::to_string).collect();
    ranks.join(", ")
}

impl CheckpointError {
    /// An error of the file system.
    pub fn io(action: &'static str, path: impl AsRef<Path>, source: io::Error) -> Self {
        let path = path.as_ref().to_path_buf();
        Self::Io {
            action,
            path,
            source,
        }
    }

    /// An error for invalid content.
    pub fn corrupt(path: impl AsRef<Path>, what: impl Into<String>) -> Self {
        Self::Corrupt {
            path: path.as_ref().to_path_buf(),
            what: what.into(),
        }
    }

    /// An error for a tensor that the source `of` does not have.
    pub fn missing(of: impl Into<String>, key: impl Into<String>) -> Self {
        Self::Missing {
            of: of.into(),
            keys: vec![key.into()],
        }
    }

    /// Checks that a slice is within a tensor of this shape.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::OutOfBounds`] if it is not.
    pub fn check_bounds(key: &str, shape: &[usize], slice: &TensorSlice) -> Result<(), Self> {
        if slice.fits(shape) {
            return Ok(());
        }
        Err(Self::OutOfBounds {
            key: key.into(),
            shape: shape.to_vec(),
            slice: slice.clone(),
        })
    }
}
