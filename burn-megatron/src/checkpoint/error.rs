//! Errors of saving and loading checkpoints.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::TensorSlice;
use crate::comm::CommError;
use crate::data_parallel::format_bytes;

/// An error that occurred while a checkpoint was saved or loaded.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// A file system operation failed.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// The operation that failed.
        action: &'static str,
        /// The path of the file or folder.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The source does not have some tensors of the model.
    #[error("{of} has no {}", keys.join(", "))]
    Missing {
        /// The name of the tensor source.
        of: String,
        /// The keys of the tensors.
        keys: Vec<String>,
    },
    /// The source has tensors that the model does not have.
    #[error("{of} has {}, which the model does not have", keys.join(", "))]
    Unexpected {
        /// The name of the tensor source.
        of: String,
        /// The keys of the tensors.
        keys: Vec<String>,
    },
    /// The output path of a command is not allowed.
    #[error("cannot write to {}: {what}; choose another path", path.display())]
    Output {
        /// The output path.
        path: PathBuf,
        /// The reason.
        what: String,
    },
    /// The shape of a tensor differs from its shape in the model.
    #[error("{key} has the shape {found:?} in {of}, and {wanted:?} in the model")]
    Shape {
        /// The name of the tensor source.
        of: String,
        /// The key of the tensor.
        key: String,
        /// The shape of the tensor in the source.
        found: Vec<usize>,
        /// The shape of the tensor in the model.
        wanted: Vec<usize>,
    },
    /// A slice is not within its tensor.
    #[error("the slice {slice} of {key} is out of bounds: its shape is {shape:?}")]
    OutOfBounds {
        /// The key of the tensor.
        key: String,
        /// The shape of the tensor.
        shape: Vec<usize>,
        /// The requested slice.
        slice: TensorSlice,
    },
    /// A file has invalid content.
    #[error("{}: {what}", path.display())]
    Corrupt {
        /// The path of the file.
        path: PathBuf,
        /// The reason.
        what: String,
    },
    /// A write failed, for example because the disk is full.
    #[error("cannot write {}: {source}; {} were to be written", path.display(), format_bytes(*total))]
    Write {
        /// The path of the file.
        path: PathBuf,
        /// The expected size of the complete file, in bytes.
        total: u64,
        /// The cause.
        source: io::Error,
    },
    /// A manifest has an unsupported version of the format.
    #[error(
        "{} has version {found} of the format; this program reads version {known}", path.display()
    )]
    Version {
        /// The path of the manifest.
        path: PathBuf,
        /// The version found.
        found: u64,
        /// The supported version.
        known: u64,
    },
    /// The newest checkpoint of a folder cannot be read at present, but it may be intact.
    #[error("cannot use the checkpoint of step {step}, which may be intact: {source}")]
    MayBeIntact {
        /// The step of the checkpoint.
        step: u64,
        /// The cause.
        source: Box<CheckpointError>,
    },
    /// A run resumes from a step, but its folder has checkpoints of later steps.
    #[error(
        "{} has checkpoints of later steps than {step}: {}", path.display(),
        later.iter().map(u64::to_string).collect::<Vec<_>>().join(", ")
    )]
    LaterSteps {
        /// The path of the folder.
        path: PathBuf,
        /// The step that the run resumes from.
        step: u64,
        /// The later steps that have checkpoints.
        later: Vec<u64>,
    },
    /// Another run holds the lock of the folder.
    #[error(
        "{} is being written by {holder}: use another folder for this run, or wait until the other run ends",
        path.display()
    )]
    Locked {
        /// The path of the folder.
        path: PathBuf,
        /// The process that holds the lock.
        holder: String,
    },
    /// A folder has no finished checkpoint.
    #[error("{} has no finished checkpoint{}", path.display(), also(there))]
    NoCheckpoint {
        /// The path of the folder.
        path: PathBuf,
        /// The names of the checkpoints that the folder contains even though the file `latest` is missing.
        there: Vec<String>,
    },
    /// The folder already has a checkpoint of this step.
    #[error("{} already has a checkpoint of step {step}: give another folder", path.display())]
    Exists {
        /// The path of the folder.
        path: PathBuf,
        /// The step.
        step: u64,
    },
    /// Two shards overlap.
    #[error("{key}: the element {element:?} was saved twice, in {first} and in {second}")]
    Overlap {
        /// The key of the tensor.
        key: String,
        /// One shard.
        first: TensorSlice,
        /// The other shard.
        second: TensorSlice,
        /// The indices of the first element that is in both shards.
        element: Vec<usize>,
    },
    /// An element is in no shard.
    #[error("{key}: the element {element:?} was not saved")]
    Gap {
        /// The key of the tensor.
        key: String,
        /// The indices of the first element that is in no shard.
        element: Vec<usize>,
    },
    /// Two ranks saved a tensor with different types or shapes.
    #[error("{key} is {first} on one rank and {second} on another")]
    Mismatch {
        /// The key of the tensor.
        key: String,
        /// The type and shape on one rank.
        first: String,
        /// The type and shape on the other rank.
        second: String,
    },
    /// Two objects or shards were saved with the same key.
    #[error("{key} was saved twice")]
    Duplicate {
        /// The key of the object or the shard.
        key: String,
    },
    /// The size of a tensor in bytes overflows.
    #[error("{key} cannot have the shape {shape:?}: its size in bytes overflows 64 bits")]
    TooLarge {
        /// The key of the tensor.
        key: String,
        /// The shape of the tensor.
        shape: Vec<usize>,
    },
    /// The data of a slice has a wrong number of bytes.
    #[error("{key} has {wanted} bytes in {slice}, but {found} were given")]
    Length {
        /// The key of the tensor.
        key: String,
        /// The slice.
        slice: TensorSlice,
        /// The number of bytes of the data.
        found: usize,
        /// The number of bytes of the slice.
        wanted: usize,
    },
    /// A chunk does not match its checksum.
    #[error(
        "{}: chunk {chunk} of {chunks} of {key} has changed since it was written", path.display()
    )]
    Checksum {
        /// The path of the file.
        path: PathBuf,
        /// The name of the object, or the name of the tensor with its slice.
        key: String,
        /// The number of the chunk that has changed, counted from 1.
        chunk: usize,
        /// The number of chunks of the tensor slice or object. A chunk has 4 MiB.
        chunks: usize,
    },
    /// A rank could not write its part of the checkpoint.
    #[error("rank {rank} could not write its part of the checkpoint: {reason}")]
    RankFailed {
        /// The rank.
        rank: usize,
        /// The reason that the rank reported.
        reason: String,
    },
    /// Some ranks did not write their parts of the checkpoint before the deadline.
    #[error(
        "no part of the checkpoint from rank {} after {:.0} s", list(ranks), waited.as_secs_f64()
    )]
    Timeout {
        /// The ranks whose parts are missing.
        ranks: Vec<usize>,
        /// The time for which this rank waited.
        waited: Duration,
    },
    /// The new checkpoint is saved, but an older one could not be removed.
    #[error("{} is saved, but an older checkpoint could not be removed: {source}", path.display())]
    Leftover {
        /// The path of the new checkpoint.
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
    /// Creates an error for a file system operation that failed.
    pub fn io(action: &'static str, path: impl AsRef<Path>, source: io::Error) -> Self {
        let path = path.as_ref().to_path_buf();
        Self::Io {
            action,
            path,
            source,
        }
    }

    /// Creates an error for invalid content.
    pub fn corrupt(path: impl AsRef<Path>, what: impl Into<String>) -> Self {
        Self::Corrupt {
            path: path.as_ref().to_path_buf(),
            what: what.into(),
        }
    }

    /// Creates an error for a tensor that the source `of` does not have.
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
    /// [`CheckpointError::OutOfBounds`] if the slice is not within the tensor.
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
