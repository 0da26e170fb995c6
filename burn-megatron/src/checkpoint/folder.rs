//! A folder of checkpoints.

use std::fs::{File, TryLockError};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::SystemTime;

use super::disk::{self, Disk, DiskFile};
use super::{Checkpoint, CheckpointError, Draft, Retention};

/// The file that names the newest checkpoint.
pub(super) const LATEST: &str = "latest";
/// The file that the run which writes here holds.
const LOCK: &str = "lock";
/// Before the name of a save that is not finished.
const DRAFT: &str = ".saving-";
/// Before the name of a checkpoint that is being removed.
const REMOVED: &str = ".removing-";
/// Before the name of a file that takes the place of another.
const NEW: &str = ".new-";

/// A folder of checkpoints, such as `RUN/checkpoints`.
///
/// Each lies in a folder of its own, `step-00000100`; the file `latest` names the newest. Clones share the
/// lock.
#[derive(Clone, Debug)]
pub struct CheckpointFolder {
    path: PathBuf,
    disk: Disk,
    lock: Arc<Mutex<Weak<Held>>>,
}

/// The right to write into a folder; it ends with the last clone, or with the process.
#[derive(Clone, Debug)]
pub struct FolderLock {
    _held: Arc<Held>,
}

#[derive(Debug)]
struct Held {
    file: File,
}

impl Drop for Held {
    fn drop(&mut self) {
        // Closing is not enough: a process that is just being started has the file too, for a moment.
        let _ = self.file.unlock();
    }
}

/// The name of a checkpoint. A step that is saved again, after one that cannot be read, gets a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Name {
    pub step: u64,
    /// 1 for the first.
    pub copy: u32,
}

impl Name {
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
    /// Creates the folder if it is not there.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Io`].
    pub fn create(path: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        Self::create_on(Disk::default(), path)
    }

    /// [`Self::create`] on a disk that can fail on purpose.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Io`].
    pub fn create_on(disk: Disk, path: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        disk.create_folders(path.as_ref())?;
        Self::open_on(disk, path)
    }

    /// Opens a folder that is there.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Io`].
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

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn disk(&self) -> &Disk {
        &self.disk
    }

    /// Keeps all other runs from writing here, until the last clone of the lock goes. A process that dies
    /// holds nothing.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Locked`] if another one writes here; [`CheckpointError::Io`].
    pub fn lock(&self) -> Result<FolderLock, CheckpointError> {
        let mut shared = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(_held) = shared.upgrade() {
            return Ok(FolderLock { _held });
        }
        let path = self.path.join(LOCK);
        let file = self.disk.open_or_create(&path)?;
        match file.file().try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(CheckpointError::Locked {
                    path: self.path.clone(),
                    holder: holder(file),
                });
            }
            Err(TryLockError::Error(error)) => {
                return Err(CheckpointError::io("lock", &path, error));
            }
        }
        let file = name_holder(file).map_err(|error| CheckpointError::io("write", &path, error))?;
        let held = Arc::new(Held { file });
        *shared = Arc::downgrade(&held);
        Ok(FolderLock { _held: held })
    }

    /// The names of all checkpoints, oldest first.
    pub(super) fn names(&self) -> Result<Vec<Name>, CheckpointError> {
        let names = disk::names(&self.path)?;
        let mut names: Vec<_> = names.iter().filter_map(|name| Name::parse(name)).collect();
        names.sort();
        Ok(names)
    }

    /// The steps of all checkpoints, oldest first.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Io`].
    pub fn steps(&self) -> Result<Vec<u64>, CheckpointError> {
        let mut steps: Vec<_> = self.names()?.iter().map(|name| name.step).collect();
        steps.dedup();
        Ok(steps)
    }

    /// The checkpoint that `latest` names; none if no save was finished.
    ///
    /// # Errors
    ///
    /// [`CheckpointError`] if it cannot be opened.
    pub fn latest(&self) -> Result<Option<Checkpoint>, CheckpointError> {
        match self.pointer()? {
            None => Ok(None),
            Some(name) => Checkpoint::open_at(self.path.join(name)).map(Some),
        }
    }

    /// What `latest` says.
    fn pointer(&self) -> Result<Option<String>, CheckpointError> {
        let path = self.path.join(LATEST);
        let text = match std::fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(CheckpointError::io("read", path, error)),
        };
        let text = String::from_utf8_lossy(&text);
        let others = || {
            let names = self.names().unwrap_or_default();
            let names: Vec<_> = names.into_iter().map(Name::text).collect();
            match names.is_empty() {
                true => "there is no other".to_string(),
                false => format!("there are {}: open one by name", names.join(", ")),
            }
        };
        let Some(name) = text.strip_suffix('\n').and_then(Name::parse) else {
            let what = format!("it says {text:?}, which names no checkpoint; {}", others());
            return Err(CheckpointError::corrupt(path, what));
        };
        if !self.path.join(name.text()).is_dir() {
            let what = format!("it names {}, which is not there; {}", name.text(), others());
            return Err(CheckpointError::corrupt(path, what));
        }
        Ok(Some(name.text()))
    }

    /// Begins a save; one rank does, and tells the others the [name](Draft::name). What killed saves left
    /// behind goes. No other run can write here until the draft is published or dropped.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Locked`], [`CheckpointError::Io`].
    pub fn begin(&self, step: u64) -> Result<Draft, CheckpointError> {
        let lock = self.lock()?;
        self.remove_leftovers()?;
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let since = since.unwrap_or_default().as_nanos();
        let name = format!("{DRAFT}{step:08}-{since:x}-{:x}", std::process::id());
        self.disk.create_folders(&self.path.join(&name))?;
        Ok(Draft::new(self.clone(), name, Some((lock, step))))
    }

    /// The draft that another rank has begun under this name.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Io`] if it is not there.
    pub fn join(&self, name: &str) -> Result<Draft, CheckpointError> {
        let path = self.path.join(name);
        if !name.starts_with(DRAFT) || name.contains(['/', '\\']) {
            return Err(CheckpointError::corrupt(
                path,
                "it names no save that was begun",
            ));
        }
        disk::names(&path)?;
        Ok(Draft::new(self.clone(), name.into(), None))
    }

    fn remove_leftovers(&self) -> Result<(), CheckpointError> {
        for name in disk::names(&self.path)? {
            let path = self.path.join(&name);
            if [DRAFT, REMOVED, NEW].iter().any(|of| name.starts_with(of)) {
                self.disk.remove(&path)?;
            }
        }
        Ok(())
    }

    /// A name for a new checkpoint of this step, which no other has.
    pub(super) fn free_name(&self, step: u64) -> Result<Name, CheckpointError> {
        let names = self.names()?;
        let copies = names.iter().filter(|name| name.step == step);
        let last = copies.map(|name| name.copy).max().unwrap_or(0);
        Ok(Name {
            step,
            copy: last + 1,
        })
    }

    /// Makes a checkpoint the latest.
    pub(super) fn point_to(&self, name: Name) -> Result<(), CheckpointError> {
        let text = name.text() + "\n";
        self.disk.replace(&self.path.join(LATEST), text.as_bytes())
    }

    /// Removes what is not kept beside the new one.
    pub(super) fn retain(&self, keep: &Retention, new: Name) -> Result<(), CheckpointError> {
        let names = self.names()?;
        let mut steps: Vec<_> = names.iter().map(|name| name.step).collect();
        steps.dedup();
        let removed = keep.removes(&steps);
        for name in names {
            let replaced = name.step == new.step && name.copy < new.copy;
            if name != new && (replaced || removed.contains(&name.step)) {
                self.remove(name)?;
            }
        }
        Ok(())
    }

    /// Lets `latest` name what is left when others lose their names; nothing is left if `None`.
    pub(super) fn point_to_newest(&self, left: Option<Name>) -> Result<(), CheckpointError> {
        let pointer = self.path.join(LATEST);
        match left {
            Some(name) => self.point_to(name),
            None if pointer.exists() => self.disk.remove_file(&pointer),
            None => Ok(()),
        }
    }

    fn remove(&self, name: Name) -> Result<(), CheckpointError> {
        self.remove_named(&name.text())
    }

    /// Under another name first, so that a half is never taken for a checkpoint.
    pub(super) fn remove_named(&self, name: &str) -> Result<(), CheckpointError> {
        let from = self.path.join(name);
        if from.is_symlink() {
            return self.disk.remove(&from);
        }
        let to = self.path.join(format!("{REMOVED}{name}"));
        self.disk.rename(&from, &to)?;
        self.disk.remove(&to)
    }
}

/// Who says that it holds a lock.
fn holder(file: DiskFile) -> String {
    let mut text = String::new();
    // At most a line: anything may stand there.
    let read = file.file().take(200).read_to_string(&mut text);
    match text.lines().next() {
        Some(line) if read.is_ok() && !line.is_empty() => line.to_string(),
        _ => "another process".to_string(),
    }
}

/// Writes who holds the lock.
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

    /// As between the fork and the exec of a child.
    #[test]
    fn who_shares_the_file_does_not_keep_the_lock() {
        let name = format!("burn-megatron-lock-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let folder = CheckpointFolder::create(&path).unwrap();
        let lock = folder.lock().unwrap();
        let _shared = lock._held.file.try_clone().unwrap();
        drop(lock);
        CheckpointFolder::open(&path).unwrap().lock().unwrap();
        std::fs::remove_dir_all(&path).unwrap();
    }
}
