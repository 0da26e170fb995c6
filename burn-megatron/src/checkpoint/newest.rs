//! Which checkpoint of a folder a run can go on from, and why others cannot be used.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use super::folder::Name;
use super::{Checkpoint, CheckpointError, CheckpointFolder};

/// Why a checkpoint cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unusable {
    /// Its bytes are not those that were written, or files of it are missing.
    Corrupt,
    /// The file system does not give its bytes now: it may be whole.
    Unreadable,
    /// Another version of this library wrote it: it may be whole.
    Version,
}

impl Unusable {
    /// A word for it, as in the name of a checkpoint that was [set aside](CheckpointFolder::set_aside).
    pub fn word(self) -> &'static str {
        match self {
            Self::Corrupt => "corrupt",
            Self::Unreadable => "io",
            Self::Version => "version",
        }
    }
}

impl CheckpointError {
    /// Why the checkpoint that this is the error of cannot be used. A file that is missing in its folder is
    /// corruption; every other failure of the file system may be over later.
    pub fn unusable(&self) -> Unusable {
        match self {
            Self::Version { .. } => Unusable::Version,
            Self::Io { source, path, .. } => match source.kind() {
                // A name that is there and leads nowhere is a link to a disk that is not mounted.
                ErrorKind::NotFound if path.symlink_metadata().is_err() => Unusable::Corrupt,
                // It has become shorter.
                ErrorKind::UnexpectedEof => Unusable::Corrupt,
                _ => Unusable::Unreadable,
            },
            _ => Unusable::Corrupt,
        }
    }
}

/// A checkpoint that was passed over, and why.
#[derive(Debug)]
pub struct PassedOver {
    pub(super) name: Name,
    /// What is wrong with it.
    pub error: CheckpointError,
}

impl PassedOver {
    /// Its step.
    pub fn step(&self) -> u64 {
        self.name.step
    }
}

/// What [`CheckpointFolder::newest_whole`] finds.
#[derive(Debug, Default)]
pub struct Newest {
    /// The newest whole checkpoint.
    pub checkpoint: Option<Checkpoint>,
    /// Newer ones, which are not whole.
    pub passed: Vec<PassedOver>,
}

impl CheckpointFolder {
    /// The newest checkpoint of which every byte is as it was written, and why newer ones were passed over.
    /// It reads all of their data; `watch` gets the bytes that were read since its last call, and of which
    /// checkpoint.
    ///
    /// Passed over is what is corrupt. What cannot be read now, or is of another version of the format, may
    /// be whole: it is passed over where its step is one of `skip`, and else an error.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::MayBeWhole`]; [`CheckpointError::Io`] if the folder cannot be read.
    pub fn newest_whole(
        &self,
        skip: &[u64],
        watch: &mut dyn FnMut(&Checkpoint, u64),
    ) -> Result<Newest, CheckpointError> {
        self.newest(skip, &mut |found| {
            found.verify(&mut |bytes| watch(found, bytes)).map(drop)
        })
    }

    /// [`Self::newest_whole`] by the manifests alone: the sizes of all files are checked, but not their data.
    ///
    /// # Errors
    ///
    /// As those.
    pub fn newest_complete(&self, skip: &[u64]) -> Result<Newest, CheckpointError> {
        self.newest(skip, &mut |_| Ok(()))
    }

    fn newest(
        &self,
        skip: &[u64],
        check: &mut dyn FnMut(&Checkpoint) -> Result<(), CheckpointError>,
    ) -> Result<Newest, CheckpointError> {
        let mut passed = vec![];
        for name in self.names()?.into_iter().rev() {
            let path = self.path().join(name.text());
            let found = is_reachable(&path).and_then(|()| Checkpoint::open_at(path));
            let error = match found.and_then(|found| check(&found).map(|()| found)) {
                Ok(checkpoint) => {
                    let checkpoint = Some(checkpoint);
                    return Ok(Newest { checkpoint, passed });
                }
                Err(error) => error,
            };
            if error.unusable() != Unusable::Corrupt && !skip.contains(&name.step) {
                return Err(CheckpointError::MayBeWhole {
                    step: name.step,
                    source: Box::new(error),
                });
            }
            passed.push(PassedOver { name, error });
        }
        Ok(Newest {
            checkpoint: None,
            passed,
        })
    }
}

/// Tells a checkpoint whose files are gone from one whose disk is not there: no save leaves an empty folder.
fn is_reachable(path: &Path) -> Result<(), CheckpointError> {
    let failed = |error| CheckpointError::io("list", path, error);
    match fs::read_dir(path).map_err(failed)?.next() {
        Some(entry) => entry.map(drop).map_err(failed),
        None => {
            let empty = "the folder is empty, as where a disk is not mounted";
            Err(failed(std::io::Error::other(empty)))
        }
    }
}
