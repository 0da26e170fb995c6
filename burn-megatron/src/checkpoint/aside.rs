//! Checkpoints that do not count any more, and are not lost: folders under another name.

use std::fs;
use std::path::{Path, PathBuf};

use super::folder::Name;
use super::{CheckpointError, CheckpointFolder, PassedOver, disk};

/// After the name of a checkpoint that was passed over, before why.
const UNREADABLE: &str = ".unreadable-";
/// After the name of a checkpoint of a step that the run has gone back from.
const DISCARDED: &str = ".discarded";

/// A checkpoint that was set aside: no run goes on from it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Aside {
    /// Where it lies.
    pub path: PathBuf,
    /// Whether the next checkpoint that is published takes its place. What was passed over is never removed.
    pub is_discarded: bool,
    /// Its bytes; none where they cannot be counted.
    pub bytes: Option<u64>,
}

impl Aside {
    /// The name of its folder.
    pub fn name(&self) -> String {
        let name = self.path.file_name().unwrap_or_default();
        name.to_string_lossy().into_owned()
    }
}

impl CheckpointFolder {
    /// What was set aside here, sorted by name.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Io`].
    pub fn aside(&self) -> Result<Vec<Aside>, CheckpointError> {
        let names = disk::names(self.path())?.into_iter();
        let aside = names.filter(|name| is_aside(name, UNREADABLE) || is_aside(name, DISCARDED));
        let aside = aside.map(|name| {
            let path = self.path().join(&name);
            Aside {
                bytes: bytes_of(&path).ok(),
                is_discarded: is_aside(&name, DISCARDED),
                path,
            }
        });
        Ok(aside.collect())
    }

    /// Renames what was passed over, so that it is never taken for a checkpoint again, counted or removed:
    /// `step-00000100.unreadable-corrupt`. `latest` then names the newest that is left.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Locked`], [`CheckpointError::Io`].
    pub fn set_aside(&self, passed: &[PassedOver]) -> Result<(), CheckpointError> {
        let reason = |name: &Name| {
            let passed = passed.iter().find(|passed| passed.name == *name)?;
            Some(format!("{UNREADABLE}{}", passed.error.unusable().word()))
        };
        self.rename_some(&reason).map(drop)
    }

    /// Renames the checkpoints of later steps, which a run that goes back to `step` makes anew:
    /// `step-00000100.discarded`; gives their steps. They are removed when the next checkpoint is published.
    /// `latest` then names the newest that is left.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Locked`], [`CheckpointError::Io`].
    pub fn discard_after(&self, step: u64) -> Result<Vec<u64>, CheckpointError> {
        let discarded = |name: &Name| (name.step > step).then(|| DISCARDED.to_string());
        self.rename_some(&discarded)
    }

    /// Gives the checkpoints for which there is a suffix another name; gives their steps.
    fn rename_some(
        &self,
        suffix: &dyn Fn(&Name) -> Option<String>,
    ) -> Result<Vec<u64>, CheckpointError> {
        let _lock = self.lock()?;
        let names = self.names()?.into_iter();
        let (gone, kept): (Vec<_>, Vec<_>) = names
            .map(|name| (name, suffix(&name)))
            .partition(|(_, suffix)| suffix.is_some());
        if gone.is_empty() {
            return Ok(vec![]);
        }
        // First the pointer, so that it never points to nothing.
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

    /// The path of this name, with a number where it is taken.
    fn free_path(&self, wanted: &str) -> Result<PathBuf, CheckpointError> {
        let taken = disk::names(self.path())?;
        let numbered = (2..).map(|number| format!("{wanted}-{number}"));
        let mut names = std::iter::once(wanted.to_string()).chain(numbered);
        let free = names.find(|name| !taken.contains(name));
        Ok(self.path().join(free.expect("numbers do not end")))
    }

    /// Removes what was discarded, now that a new checkpoint is there.
    pub(super) fn remove_discarded(&self) -> Result<(), CheckpointError> {
        for name in disk::names(self.path())? {
            if is_aside(&name, DISCARDED) {
                self.remove_named(&name)?;
            }
        }
        Ok(())
    }
}

/// Whether a name is that of a checkpoint with this suffix.
fn is_aside(name: &str, suffix: &str) -> bool {
    let split = name.split_once(suffix);
    split.is_some_and(|(name, _)| Name::parse(name).is_some())
}

/// The bytes of all files in a folder; of a link those of the link.
fn bytes_of(path: &Path) -> std::io::Result<u64> {
    let metadata = fs::symlink_metadata(path)?;
    if !metadata.is_dir() {
        return Ok(metadata.len());
    }
    fs::read_dir(path)?.try_fold(0, |sum, entry| Ok(sum + bytes_of(&entry?.path())?))
}
