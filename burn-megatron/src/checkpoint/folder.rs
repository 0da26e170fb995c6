//! A folder of checkpoints.

use std::fs::{File, TryLockError};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::SystemTime;

use parking_lot::Mutex;

use super::disk::{self, Disk, DiskFile};
use super::{Checkpoint, CheckpointError, PendingCheckpoint, Retention};
use crate::regular_file;

/// The name of the file that contains the name of the newest checkpoint.
pub(super) const LATEST: &str = "latest";
/// The name of the lock file in a folder of checkpoints. The run that writes to the folder holds the lock.
pub const LOCK: &str = "lock";
/// The maximum size of `latest` that is read, in bytes.
const MAX_POINTER_BYTES: u64 = 1 << 10;
/// The prefix of unfinished saves.
const PENDING_PREFIX: &str = ".saving-";
/// The prefix of checkpoints that are being removed.
const REMOVING_PREFIX: &str = ".removing-";
/// The prefix of new files that will replace existing files.
const NEW_PREFIX: &str = ".new-";

/// A folder of checkpoints, such as `RUN/checkpoints`.
///
/// Each checkpoint is a folder such as `step-00000100`. The file `latest` contains the name of the newest checkpoint.
/// Clones of a `CheckpointFolder` share its lock.
#[derive(Clone, Debug)]
pub struct CheckpointFolder {
    path: PathBuf,
    disk: Disk,
    lock: Arc<Mutex<Weak<LockedFile>>>,
}

/// An exclusive lock for writing to a folder. It is released when the last clone is dropped or the process
/// ends.
#[derive(Clone, Debug)]
pub struct FolderLock {
    _file: Arc<LockedFile>,
}

#[derive(Debug)]
struct LockedFile {
    file: File,
}

impl Drop for LockedFile {
    fn drop(&mut self) {
        // Closing is not enough, because a child process between fork and exec shares the file.
        let _ = self.file.unlock();
    }
}

/// The name of a checkpoint. If a step is saved again, a number is appended to the name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct CheckpointName {
    pub step: u64,
    /// The number of the checkpoint among the checkpoints of the same step, counted from 1.
    pub copy: u32,
}

impl CheckpointName {
    pub(super) fn parse(name: &str) -> Option<Self> {
        let rest = name.strip_prefix("step-")?;
        let (step, copy) = rest.split_once('-').unwrap_or((rest, "1"));
        let parsed = Self {
            step: step.parse().ok()?,
            copy: copy.parse().ok()?,
        };
        (parsed.text() == name).then_some(parsed)
    }

    pub(super) fn text(self) -> String {
        match self.copy {
            1 => format!("step-{:08}", self.step),
            copy => format!("step-{:08}-{copy}", self.step),
        }
    }
}

impl CheckpointFolder {
    /// Opens a folder of checkpoints, and creates the folder if it does not exist.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Io`] if the folder cannot be created or read.
    pub fn create(path: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        Self::create_on(Disk::default(), path)
    }

    /// Opens or creates a folder of checkpoints like [`Self::create`], but on a disk with fault injection.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Io`] if the folder cannot be created or read.
    pub fn create_on(disk: Disk, path: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        disk.create_folders(path.as_ref())?;
        Self::open_on(disk, path)
    }

    /// Opens an existing folder of checkpoints.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Io`] if the folder does not exist or cannot be read.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        Self::open_on(Disk::default(), path)
    }

    fn open_on(disk: Disk, path: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        let path = path.as_ref().to_path_buf();
        disk::names(&path)?;
        Ok(Self {
            path,
            disk,
            lock: Arc::default(),
        })
    }

    /// Returns the path of the folder of checkpoints.
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn disk(&self) -> &Disk {
        &self.disk
    }

    /// Locks the folder against other runs until the last clone of the lock is dropped or the process ends.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Locked`] if another process holds the lock; [`CheckpointError::Io`] if the lock file
    /// cannot be written.
    pub fn lock(&self) -> Result<FolderLock, CheckpointError> {
        let mut shared = self.lock.lock();
        if let Some(_file) = shared.upgrade() {
            return Ok(FolderLock { _file });
        }
        let path = self.path.join(LOCK);
        let file = self.disk.open_or_create(&path)?;
        try_lock(file.file(), &self.path)?;
        let file = name_holder(file).map_err(|error| CheckpointError::io("write", &path, error))?;
        let locked = Arc::new(LockedFile { file });
        *shared = Arc::downgrade(&locked);
        Ok(FolderLock { _file: locked })
    }

    /// Returns the names of all checkpoints, oldest first.
    pub(super) fn names(&self) -> Result<Vec<CheckpointName>, CheckpointError> {
        let mut names: Vec<_> = disk::names(&self.path)?
            .iter()
            .filter_map(|name| CheckpointName::parse(name))
            .collect();
        names.sort();
        Ok(names)
    }

    /// Returns the steps of all checkpoints in the folder, oldest first.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Io`] if the folder cannot be read.
    pub fn steps(&self) -> Result<Vec<u64>, CheckpointError> {
        let mut steps: Vec<_> = self.names()?.iter().map(|name| name.step).collect();
        steps.dedup();
        Ok(steps)
    }

    /// Opens all checkpoints of the folder, oldest first.
    ///
    /// # Errors
    ///
    /// [`CheckpointError`] if a checkpoint cannot be opened.
    pub fn checkpoints(&self) -> Result<Vec<Checkpoint>, CheckpointError> {
        let names = self.names()?.into_iter();
        names
            .map(|name| Checkpoint::open_at(self.path.join(name.text())))
            .collect()
    }

    /// Opens the checkpoint whose name is in the file `latest`. Returns `None` if no save has finished.
    ///
    /// # Errors
    ///
    /// [`CheckpointError`] if the checkpoint cannot be opened.
    pub fn latest(&self) -> Result<Option<Checkpoint>, CheckpointError> {
        match self.pointer()? {
            None => Ok(None),
            Some(name) => Checkpoint::open_at(self.path.join(name)).map(Some),
        }
    }

    /// Returns the content of `latest`.
    fn pointer(&self) -> Result<Option<String>, CheckpointError> {
        let path = self.path.join(LATEST);
        let text = match regular_file::read(&path, MAX_POINTER_BYTES) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(CheckpointError::io("read", path, error)),
        };
        let text = String::from_utf8_lossy(&text);
        let others = || {
            let names: Vec<_> = self
                .names()
                .unwrap_or_default()
                .into_iter()
                .map(CheckpointName::text)
                .collect();
            if names.is_empty() {
                "there is no other checkpoint".to_string()
            } else {
                format!("there are {}: open one by name", names.join(", "))
            }
        };
        let Some(name) = text.strip_suffix('\n').and_then(CheckpointName::parse) else {
            let what = format!("its text {text:?} names no checkpoint; {}", others());
            return Err(CheckpointError::corrupt(path, what));
        };
        if !self.path.join(name.text()).is_dir() {
            let what = format!(
                "it names {}, which does not exist; {}",
                name.text(),
                others()
            );
            return Err(CheckpointError::corrupt(path, what));
        }
        Ok(Some(name.text()))
    }

    /// Begins to save a checkpoint. Call this method on one rank and send the [name](PendingCheckpoint::name) to the
    /// other ranks. This method removes the files of interrupted saves. The folder stays locked until the checkpoint is
    /// published or dropped.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Locked`] if another process holds the lock; [`CheckpointError::Io`] if a file system
    /// operation fails.
    pub fn begin(&self, step: u64) -> Result<PendingCheckpoint, CheckpointError> {
        let lock = self.lock()?;
        self.remove_leftovers()?;
        let since = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default()
            .as_nanos();
        let name = format!(
            "{PENDING_PREFIX}{step:08}-{since:x}-{:x}",
            std::process::id()
        );
        self.disk.create_folders(&self.path.join(&name))?;
        Ok(PendingCheckpoint::new(self.clone(), name, Some(lock)))
    }

    /// Joins a checkpoint that another rank has [begun](Self::begin) to save. `name` is the
    /// [name](PendingCheckpoint::name) of the pending checkpoint.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Io`] if there is no pending checkpoint with this name.
    pub fn join(&self, name: &str) -> Result<PendingCheckpoint, CheckpointError> {
        let path = self.path.join(name);
        if !name.starts_with(PENDING_PREFIX) || name.contains(['/', '\\']) {
            return Err(CheckpointError::corrupt(
                path,
                "it is not the name of a pending checkpoint",
            ));
        }
        disk::names(&path)?;
        Ok(PendingCheckpoint::new(self.clone(), name.into(), None))
    }

    fn remove_leftovers(&self) -> Result<(), CheckpointError> {
        for name in disk::names(&self.path)? {
            let path = self.path.join(&name);
            if [PENDING_PREFIX, REMOVING_PREFIX, NEW_PREFIX]
                .iter()
                .any(|of| name.starts_with(of))
            {
                self.disk.remove(&path)?;
            }
        }
        Ok(())
    }

    /// Returns an unused name for a new checkpoint of this step.
    pub(super) fn free_name(&self, step: u64) -> Result<CheckpointName, CheckpointError> {
        let names = self.names()?;
        let copies = names.iter().filter(|name| name.step == step);
        let last = copies.map(|name| name.copy).max().unwrap_or(0);
        Ok(CheckpointName {
            step,
            copy: last + 1,
        })
    }

    /// Writes the name of this checkpoint to the file `latest`.
    pub(super) fn point_to(&self, name: CheckpointName) -> Result<(), CheckpointError> {
        let text = name.text() + "\n";
        self.disk.replace(&self.path.join(LATEST), text.as_bytes())
    }

    /// Removes the checkpoints that `keep` does not retain, except the new one.
    pub(super) fn retain(
        &self,
        keep: &Retention,
        new: CheckpointName,
    ) -> Result<(), CheckpointError> {
        let names = self.names()?;
        let mut steps: Vec<_> = names.iter().map(|name| name.step).collect();
        steps.dedup();
        let removed = keep.removes(&steps);
        for name in names {
            let replaced = name.step == new.step && name.copy < new.copy;
            if name != new && (replaced || removed.contains(&name.step)) {
                self.remove_named(&name.text())?;
            }
        }
        Ok(())
    }

    /// Writes the name of the newest remaining checkpoint to the file `latest`. Removes `latest` if no checkpoint is
    /// left.
    pub(super) fn point_to_newest(
        &self,
        left: Option<CheckpointName>,
    ) -> Result<(), CheckpointError> {
        let pointer = self.path.join(LATEST);
        match left {
            Some(name) => self.point_to(name),
            None if pointer.exists() => self.disk.remove_file(&pointer),
            None => Ok(()),
        }
    }

    /// Renames the checkpoint before removing it, so that a partially removed checkpoint is never opened.
    pub(super) fn remove_named(&self, name: &str) -> Result<(), CheckpointError> {
        let from = self.path.join(name);
        if from.is_symlink() {
            return self.disk.remove(&from);
        }
        let to = self.path.join(format!("{REMOVING_PREFIX}{name}"));
        self.disk.rename(&from, &to)?;
        self.disk.remove(&to)
    }
}

/// Locks the lock file of a folder. Returns an error if another process holds the lock.
pub(super) fn try_lock(file: &File, folder: &Path) -> Result<(), CheckpointError> {
    file.try_lock().map_err(|error| match error {
        TryLockError::WouldBlock => CheckpointError::Locked {
            path: folder.to_path_buf(),
            holder: holder(file),
        },
        TryLockError::Error(error) => CheckpointError::io("lock", folder.join(LOCK), error),
    })
}

/// Returns the process that wrote the lock file.
fn holder(file: &File) -> String {
    let mut text = String::new();
    // At most one line is read, because the content is not trusted.
    let read = file.take(200).read_to_string(&mut text);
    match text.lines().next() {
        Some(line) if read.is_ok() && !line.is_empty() => line.to_string(),
        _ => "another process".to_string(),
    }
}

/// Writes this process and host into the lock file.
fn name_holder(mut file: DiskFile) -> std::io::Result<File> {
    let host = gethostname::gethostname();
    let text = format!("process {} on {}\n", std::process::id(), host.display());
    file.clear()?;
    file.write_all(text.as_bytes())?;
    Ok(file.into_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A child process between fork and exec shares the file.
    #[test]
    fn who_shares_the_file_does_not_keep_the_lock() {
        let name = format!("burn-megatron-lock-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let folder = CheckpointFolder::create(&path).unwrap();
        let lock = folder.lock().unwrap();
        let _shared = lock._file.file.try_clone().unwrap();
        drop(lock);
        CheckpointFolder::open(&path).unwrap().lock().unwrap();
        std::fs::remove_dir_all(&path).unwrap();
    }
}
