//! Searches for the newest checkpoint from which a run can resume.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use super::folder::CheckpointName;
use super::{Checkpoint, CheckpointError, CheckpointFolder};

/// The reason why a run cannot resume from a checkpoint. It is displayed as a short label, which is part of the name of
/// a [quarantined](CheckpointFolder::quarantine) checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display)]
#[strum(serialize_all = "lowercase")]
pub enum UnusableReason {
    /// The data differs from the data that was written, or files are missing.
    Corrupt,
    /// The file system cannot read the checkpoint at present. The checkpoint may be intact.
    #[strum(serialize = "io")]
    Unreadable,
    /// The checkpoint was written by another version of this library. It may be intact.
    Version,
}

impl CheckpointError {
    /// Classifies an error that occurred while a checkpoint was opened or read. A missing file means corruption. Any
    /// other failure of the file system may be temporary.
    pub fn unusable_reason(&self) -> UnusableReason {
        match self {
            Self::Version { .. } => UnusableReason::Version,
            Self::Io { source, path, .. } => match source.kind() {
                // A dangling link may point to a disk that is not mounted.
                ErrorKind::NotFound if path.symlink_metadata().is_err() => UnusableReason::Corrupt,
                // The file was truncated.
                ErrorKind::UnexpectedEof => UnusableReason::Corrupt,
                _ => UnusableReason::Unreadable,
            },
            _ => UnusableReason::Corrupt,
        }
    }
}

/// A checkpoint that was skipped in the search for the newest usable checkpoint, with the reason.
#[derive(Debug)]
pub struct SkippedCheckpoint {
    pub(super) name: CheckpointName,
    /// The error that occurred when the checkpoint was opened or read.
    pub error: CheckpointError,
}

impl SkippedCheckpoint {
    /// Returns the step of the skipped checkpoint.
    pub fn step(&self) -> u64 {
        self.name.step
    }
}

/// The result of [`CheckpointFolder::newest_verified`].
#[derive(Debug, Default)]
pub struct NewestCheckpoint {
    /// The newest checkpoint from which a run can resume.
    pub checkpoint: Option<Checkpoint>,
    /// The newer checkpoints, which were skipped because they cannot be used.
    pub skipped: Vec<SkippedCheckpoint>,
}

impl CheckpointFolder {
    /// Returns the newest checkpoint whose data is verified, and the newer checkpoints that were skipped. This method
    /// reads all data of the checkpoints that it tries. `watch` is called with the checkpoint and the number of bytes
    /// that were read since the previous call.
    ///
    /// Corrupt checkpoints are skipped. A checkpoint may be intact if it cannot be read at present or has another
    /// version of the format. Such a checkpoint is skipped if its step is in `skip`. Otherwise an error is returned.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::MayBeIntact`] for a checkpoint that may be intact; [`CheckpointError::Io`] if the
    /// folder cannot be read.
    pub fn newest_verified(
        &self,
        skip: &[u64],
        watch: &mut dyn FnMut(&Checkpoint, u64),
    ) -> Result<NewestCheckpoint, CheckpointError> {
        self.newest(skip, &mut |found| {
            found.verify(&mut |bytes| watch(found, bytes)).map(drop)
        })
    }

    /// Returns the newest usable checkpoint like [`Self::newest_verified`], but only checks manifests and file sizes.
    /// This method does not read the data.
    ///
    /// # Errors
    ///
    /// See [`Self::newest_verified`].
    pub fn newest_complete(&self, skip: &[u64]) -> Result<NewestCheckpoint, CheckpointError> {
        self.newest(skip, &mut |_| Ok(()))
    }

    fn newest(
        &self,
        skip: &[u64],
        check: &mut dyn FnMut(&Checkpoint) -> Result<(), CheckpointError>,
    ) -> Result<NewestCheckpoint, CheckpointError> {
        let mut newest = NewestCheckpoint::default();
        for name in self.names()?.into_iter().rev() {
            let path = self.path().join(name.text());
            let found = is_reachable(&path).and_then(|()| Checkpoint::open_at(path));
            let error = match found.and_then(|found| check(&found).map(|()| found)) {
                Ok(checkpoint) => {
                    newest.checkpoint = Some(checkpoint);
                    break;
                }
                Err(error) => error,
            };
            if error.unusable_reason() != UnusableReason::Corrupt && !skip.contains(&name.step) {
                return Err(CheckpointError::MayBeIntact {
                    step: name.step,
                    source: Box::new(error),
                });
            }
            newest.skipped.push(SkippedCheckpoint { name, error });
        }
        Ok(newest)
    }
}

/// Distinguishes missing files from a disk that is not mounted. A save never leaves an empty folder.
fn is_reachable(path: &Path) -> Result<(), CheckpointError> {
    let failed = |error| CheckpointError::io("list", path, error);
    match fs::read_dir(path).map_err(failed)?.next() {
        Some(entry) => entry.map(drop).map_err(failed),
        None => {
            let empty = "the folder is empty, as if its disk were not mounted";
            Err(failed(std::io::Error::other(empty)))
        }
    }
}
