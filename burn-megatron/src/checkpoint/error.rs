//! What saving and loading can fail with.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use indicatif::HumanBytes;

use super::Slice;
use crate::comm::CommError;

/// What saving and loading can fail with.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The file system.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Tensors that the model has and the source has not.
    #[error("{of} has no {}", keys.join(", "))]
    Missing {
        /// The source.
        of: String,
        /// The tensors.
        keys: Vec<String>,
    },
    /// Tensors that the source has and the model has not.
    #[error("{of} has {}, which the model has not", keys.join(", "))]
    Unexpected {
        /// The source.
        of: String,
        /// The tensors.
        keys: Vec<String>,
    },
    /// A tensor of another shape.
    #[error("{key} has the shape {found:?} in {of}, and {wanted:?} in the model")]
    Shape {
        /// The source.
        of: String,
        /// The tensor.
        key: String,
        /// Its shape there.
        found: Vec<usize>,
        /// Its shape here.
        wanted: Vec<usize>,
    },
    /// A box that is not in its tensor.
    #[error("{key} has the shape {shape:?}, and {slice} is not in it")]
    Slice {
        /// The tensor.
        key: String,
        /// Its shape.
        shape: Vec<usize>,
        /// What was asked for.
        slice: Slice,
    },
    /// A file that is not what it should be.
    #[error("{}: {what}", path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// A file that cannot be written to its end, as on a full disk.
    #[error("cannot write {}: {source}; {} were to be written", path.display(), HumanBytes(*total))]
    Write {
        /// The file.
        path: PathBuf,
        /// The bytes that it should have.
        total: u64,
        /// Why not.
        source: io::Error,
    },
    /// A format of another version of this library.
    #[error(
        "{} has version {found} of the format, and this program reads version {known}", path.display()
    )]
    Version {
        /// The manifest.
        path: PathBuf,
        /// Its version.
        found: u64,
        /// The one that can be read.
        known: u64,
    },
    /// The newest checkpoint of a folder, which cannot be used now and may be whole.
    #[error("the checkpoint of step {step} cannot be used, and may be whole: {source}")]
    MayBeWhole {
        /// Its step.
        step: u64,
        /// Why it cannot be used.
        source: Box<CheckpointError>,
    },
    /// Checkpoints of later steps, in the folder of a run that goes back.
    #[error(
        "{} has checkpoints of later steps than {step}: {}", path.display(),
        later.iter().map(u64::to_string).collect::<Vec<_>>().join(", ")
    )]
    Later {
        /// The folder.
        path: PathBuf,
        /// The step that the run goes back to.
        step: u64,
        /// The later ones.
        later: Vec<u64>,
    },
    /// A second run that would write into the same folder.
    #[error(
        "{} is being written by {holder}: give this run another folder, or wait until that one ends",
        path.display()
    )]
    Locked {
        /// The folder.
        path: PathBuf,
        /// Who writes.
        holder: String,
    },
    /// A folder in which no checkpoint was finished.
    #[error("{} has no finished checkpoint{}", path.display(), also(there))]
    NoCheckpoint {
        /// The folder.
        path: PathBuf,
        /// The names of those that are there all the same: finished, but not made the latest.
        there: Vec<String>,
    },
    /// A folder that has a checkpoint of this step, where a new one would take its place.
    #[error("{} has a checkpoint of step {step}: give another folder", path.display())]
    Exists {
        /// The folder.
        path: PathBuf,
        /// The step.
        step: u64,
    },
    /// Two pieces that have elements in common.
    #[error("{key}: the element {element:?} was saved twice, in {first} and in {second}")]
    Overlap {
        /// The tensor.
        key: String,
        /// A piece.
        first: Slice,
        /// Another one.
        second: Slice,
        /// The first element that both have.
        element: Vec<usize>,
    },
    /// An element that is in no piece.
    #[error("{key}: the element {element:?} was not saved")]
    Gap {
        /// The tensor.
        key: String,
        /// The first such element.
        element: Vec<usize>,
    },
    /// Ranks that differ about a tensor.
    #[error("{key} is {first} for one rank and {second} for another")]
    Differ {
        /// The tensor.
        key: String,
        /// Its type and shape.
        first: String,
        /// The same, elsewhere.
        second: String,
    },
    /// A name that was given twice in one checkpoint.
    #[error("{key} was saved twice")]
    Twice {
        /// The object or the piece.
        key: String,
    },
    /// A tensor with too many elements to count.
    #[error("{key} cannot have the shape {shape:?}: its bytes cannot be counted in 64 bits")]
    TooLarge {
        /// The tensor.
        key: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// Bytes that are not those of the box that they were given for.
    #[error("{key} has {wanted} bytes in {slice}, and {found} were given")]
    Length {
        /// The tensor.
        key: String,
        /// The box.
        slice: Slice,
        /// The bytes that were given.
        found: usize,
        /// The bytes of the box.
        wanted: usize,
    },
    /// Data that has changed since it was written.
    #[error(
        "{}: chunk {chunk} of {chunks} of {key} has changed since it was written", path.display()
    )]
    Checksum {
        /// The file.
        path: PathBuf,
        /// The tensor with its box, or the object.
        key: String,
        /// The number of the chunk, from 1 on.
        chunk: usize,
        /// How many it has, of 4 MiB each.
        chunks: usize,
    },
    /// A rank that could not write its part.
    #[error("rank {rank} could not write its part of the checkpoint: {reason}")]
    Part {
        /// The rank.
        rank: usize,
        /// What it said.
        reason: String,
    },
    /// Ranks that did not write their parts in time.
    #[error(
        "no part of the checkpoint from rank {} after {:.0} s", list(ranks), waited.as_secs_f64()
    )]
    Late {
        /// The ranks.
        ranks: Vec<usize>,
        /// How long they were waited for.
        waited: Duration,
    },
    /// The new checkpoint is there, but what it replaces could not be removed.
    #[error("{} is saved, but what it replaces is still there: {source}", path.display())]
    Leftover {
        /// The new checkpoint.
        path: PathBuf,
        /// What failed.
        source: Box<CheckpointError>,
    },
    /// The other ranks.
    #[error(transparent)]
    Comm(#[from] CommError),
}

fn also(there: &[String]) -> String {
    match there {
        [] => String::new(),
        there => format!(
            ", but {} can be opened by name: `latest`, which points to the newest, is missing",
            there.join(", ")
        ),
    }
}

fn list(ranks: &[usize]) -> String {
    let ranks: Vec<_> = ranks.iter().map(usize::to_string).collect();
    ranks.join(", ")
}

impl CheckpointError {
    /// What failed on the file system.
    pub fn io(action: &'static str, path: impl AsRef<Path>, source: io::Error) -> Self {
        let path = path.as_ref().to_path_buf();
        Self::Io {
            action,
            path,
            source,
        }
    }

    /// A file that is not what it should be.
    pub fn corrupt(path: impl AsRef<Path>, what: impl Into<String>) -> Self {
        Self::Corrupt {
            path: path.as_ref().to_path_buf(),
            what: what.into(),
        }
    }
}
