//! What saving and loading can fail with.

use std::io;
use std::path::{Path, PathBuf};

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
    #[error("{key} has the shape {shape:?}, and {slice:?} is not in it")]
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
    /// The other ranks.
    #[error(transparent)]
    Comm(#[from] CommError),
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
