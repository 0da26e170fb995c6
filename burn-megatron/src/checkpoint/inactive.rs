//! Inactive checkpoints, which are kept under another name and from which no run resumes.

use std::fs;
use std::path::{Path, PathBuf};

use super::folder::CheckpointName;
use super::{CheckpointError, CheckpointFolder, SkippedCheckpoint, disk};

/// The suffix of skipped checkpoints, followed by the reason.
const UNREADABLE_SUFFIX: &str = ".unreadable-";
/// The suffix of checkpoints later than the step that the run resumed from.
const DISCARDED_SUFFIX: &str = ".discarded";

/// A checkpoint that was renamed, so that no run resumes from it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InactiveCheckpoint {
    /// The path of the inactive checkpoint.
    pub path: PathBuf,
    /// Whether the checkpoint was discarded. A discarded checkpoint is removed when the next checkpoint is published. A
    /// skipped checkpoint is never removed.
    pub is_discarded: bool,
    /// The size of the checkpoint in bytes, or `None` if the size cannot be determined.
    pub bytes: Option<u64>,
}

impl InactiveCheckpoint {
    /// Returns the folder name of the inactive checkpoint.
    pub fn name(&self) -> String {
        let name = self.path.file_name().unwrap_or_default();
        name.to_string_lossy().into_owned()
    }
}

impl CheckpointFolder {
    /// Returns the inactive checkpoints of this folder, sorted by name.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Io`] if the folder cannot be read.
    pub fn inactive(&self) -> Result<Vec<InactiveCheckpoint>, CheckpointError> {
        let names = disk::names(self.path())?.into_iter();
        let inactive = names
            .filter(|name| {
                is_checkpoint_with_suffix(name, UNREADABLE_SUFFIX)
                    || is_checkpoint_with_suffix(name, DISCARDED_SUFFIX)
            })
            .map(|name| {
                let path = self.path().join(&name);
                InactiveCheckpoint {
                    bytes: bytes_of(&path).ok(),
                    is_discarded: is_checkpoint_with_suffix(&name, DISCARDED_SUFFIX),
                    path,
                }
            });
        Ok(inactive.collect())
    }

    /// Renames skipped checkpoints, for example to `step-00000100.unreadable-corrupt`. A renamed checkpoint is not
    /// opened, counted or removed. The file `latest` then contains the name of the newest remaining checkpoint.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Locked`] if another process holds the lock; [`CheckpointError::Io`] if a file system
    /// operation fails.
    pub fn quarantine(&self, skipped: &[SkippedCheckpoint]) -> Result<(), CheckpointError> {
        let reason = |name: &CheckpointName| {
            let skipped = skipped.iter().find(|skipped| skipped.name == *name)?;
            Some(format!(
                "{UNREADABLE_SUFFIX}{}",
                skipped.error.unusable_reason()
            ))
        };
        self.rename_matching(&reason).map(drop)
    }

    /// Discards the checkpoints of steps after `step`. The run will save these steps again. A discarded checkpoint is
    /// renamed, for example to `step-00000100.discarded`, and removed when the next checkpoint is published. The file
    /// `latest` then contains the name of the newest remaining checkpoint. Returns the steps of the discarded
    /// checkpoints.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Locked`] if another process holds the lock; [`CheckpointError::Io`] if a file system
    /// operation fails.
    pub fn discard_after(&self, step: u64) -> Result<Vec<u64>, CheckpointError> {
        let discarded =
            |name: &CheckpointName| (name.step > step).then(|| DISCARDED_SUFFIX.to_string());
        self.rename_matching(&discarded)
    }

    /// Appends the suffix to the names of the checkpoints for which `suffix` returns one. Returns their steps.
    fn rename_matching(
        &self,
        suffix: &dyn Fn(&CheckpointName) -> Option<String>,
    ) -> Result<Vec<u64>, CheckpointError> {
        let _lock = self.lock()?;
        let names = self.names()?.into_iter();
        let (gone, kept): (Vec<_>, Vec<_>) = names
            .map(|name| (name, suffix(&name)))
            .partition(|(_, suffix)| suffix.is_some());
        if gone.is_empty() {
            return Ok(vec![]);
        }
        // The pointer is changed first, so that it never names a missing checkpoint.
        self.point_to_newest(kept.last().map(|(name, _)| *name))?;
        for (name, suffix) in &gone {
            let name = name.text();
            let wanted = format!("{name}{}", suffix.as_deref().unwrap_or_default());
            let to = self.free_path(&wanted)?;
            self.disk().rename(&self.path().join(name), &to)?;
        }
        self.disk().sync_folder(self.path())?;
        let mut steps: Vec<_> = gone.into_iter().map(|(name, _)| name.step).collect();
        steps.dedup();
        Ok(steps)
    }

    /// Returns the path of this name, with a number if the name is already used.
    fn free_path(&self, wanted: &str) -> Result<PathBuf, CheckpointError> {
        let taken = disk::names(self.path())?;
        let numbered = (2..).map(|number| format!("{wanted}-{number}"));
        let mut names = std::iter::once(wanted.to_string()).chain(numbered);
        let free = names.find(|name| !taken.contains(name));
        Ok(self.path().join(free.expect("some number is free")))
    }

    /// Removes discarded checkpoints after a new checkpoint was published.
    pub(super) fn remove_discarded(&self) -> Result<(), CheckpointError> {
        for name in disk::names(self.path())? {
            if is_checkpoint_with_suffix(&name, DISCARDED_SUFFIX) {
                self.remove_named(&name)?;
            }
        }
        Ok(())
    }
}

/// Whether this is the name of a checkpoint followed by this suffix.
fn is_checkpoint_with_suffix(name: &str, suffix: &str) -> bool {
    let split = name.split_once(suffix);
    split.is_some_and(|(name, _)| CheckpointName::parse(name).is_some())
}

/// Returns the size of all files in a folder. A link counts with its own size.
fn bytes_of(path: &Path) -> std::io::Result<u64> {
    let metadata = fs::symlink_metadata(path)?;
    if !metadata.is_dir() {
        return Ok(metadata.len());
    }
    fs::read_dir(path)?.try_fold(0, |sum, entry| Ok(sum + bytes_of(&entry?.path())?))
}
