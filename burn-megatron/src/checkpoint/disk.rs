//! The file system operations that save a checkpoint, with a hook for fault injection.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::CheckpointError;
use crate::regular_file::check_not_lfs_pointer;

/// A file system operation that is part of saving a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskOperation {
    /// Create a folder.
    CreateFolder,
    /// Create a file.
    Create,
    /// Append to a file.
    Write,
    /// Sync the data of a file.
    Sync,
    /// Sync the entries of a folder.
    SyncFolder,
    /// Rename a file or a folder.
    Rename,
    /// Remove a file or an empty folder.
    Remove,
}

type Hook = dyn Fn(DiskOperation, &Path) -> io::Result<()> + Send + Sync;

/// The file system to which checkpoints are written.
#[derive(Clone, Default)]
pub struct Disk {
    hook: Option<Arc<Hook>>,
    largest_write: Option<usize>,
}

impl fmt::Debug for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hooked = self.hook.is_some();
        f.debug_struct("Disk").field("hooked", &hooked).finish()
    }
}

impl Disk {
    /// Creates a disk for tests. `hook` is called before each operation. If `hook` returns an error, the operation is
    /// not run and returns this error. Each write has at most `largest_write` bytes, so that a failure can leave a
    /// partially written file.
    pub fn hooked(
        hook: impl Fn(DiskOperation, &Path) -> io::Result<()> + Send + Sync + 'static,
        largest_write: usize,
    ) -> Self {
        Self {
            hook: Some(Arc::new(hook)),
            largest_write: Some(largest_write.max(1)),
        }
    }

    fn before(&self, operation: DiskOperation, path: &Path) -> io::Result<()> {
        match &self.hook {
            Some(hook) => hook(operation, path),
            None => Ok(()),
        }
    }

    /// Runs an operation after the hook. Errors describe it as `action`.
    fn run<T>(
        &self,
        operation: DiskOperation,
        action: &'static str,
        path: &Path,
        work: impl FnOnce() -> io::Result<T>,
    ) -> Result<T, CheckpointError> {
        let result = self.before(operation, path).and_then(|()| work());
        result.map_err(|error| CheckpointError::io(action, path, error))
    }

    /// Creates a folder and its parents, and syncs their entries.
    pub(super) fn create_folders(&self, path: &Path) -> Result<(), CheckpointError> {
        if path.is_dir() {
            return Ok(());
        }
        let parent = parent(path);
        self.create_folders(parent)?;
        let result = self.before(DiskOperation::CreateFolder, path);
        match result.and_then(|()| fs::create_dir(path)) {
            Err(_)
                if let Ok(to) = fs::read_link(path)
                    && !path.is_dir() =>
            {
                let to = to.display();
                let what =
                    format!("it is a link to {to}, which is not a folder: is its disk mounted?");
                return Err(CheckpointError::corrupt(path, what));
            }
            // Another process has created it in the meantime.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => {}
            result => {
                result.map_err(|error| CheckpointError::io("create the folder", path, error))?;
            }
        }
        self.sync_folder(parent)
    }

    /// Creates a new file.
    pub(super) fn create(&self, path: &Path) -> Result<DiskFile, CheckpointError> {
        self.open(path, OpenOptions::new().create_new(true))
    }

    /// Opens or creates a file, without following a link.
    pub(super) fn open_or_create(&self, path: &Path) -> Result<DiskFile, CheckpointError> {
        if let Ok(found) = fs::symlink_metadata(path) {
            if found.is_symlink() {
                return Err(CheckpointError::corrupt(path, LINK));
            }
            if !found.is_file() {
                return Err(CheckpointError::corrupt(path, NOT_A_FILE));
            }
        }
        self.open(path, not_following(OpenOptions::new().create(true)))
    }

    fn open(&self, path: &Path, options: &mut OpenOptions) -> Result<DiskFile, CheckpointError> {
        let open = || options.read(true).write(true).open(path);
        let file = self.run(DiskOperation::Create, "create", path, open)?;
        Ok(DiskFile {
            disk: self.clone(),
            path: path.to_path_buf(),
            file,
        })
    }

    /// Writes a file atomically and durably: readers see either the old or the new content.
    pub(super) fn replace(&self, path: &Path, bytes: &[u8]) -> Result<(), CheckpointError> {
        self.write_atomically(path, bytes)?;
        self.sync_folder(parent(path))
    }

    /// Writes a file atomically. Its name is durable once the folder is synced. The last operation makes the
    /// file visible. From then on, another process may move the folder.
    pub(super) fn write_atomically(
        &self,
        path: &Path,
        bytes: &[u8],
    ) -> Result<(), CheckpointError> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let new = parent(path).join(format!(".new-{name}"));
        self.remove(&new)?;
        let mut file = self.create(&new)?;
        let written = file.write_all(bytes);
        written.map_err(|source| CheckpointError::Write {
            path: new.clone(),
            total: bytes.len() as u64,
            source,
        })?;
        file.sync()?;
        self.rename(&new, path)
    }

    pub(super) fn rename(&self, from: &Path, to: &Path) -> Result<(), CheckpointError> {
        self.run(DiskOperation::Rename, "rename", from, || {
            fs::rename(from, to)
        })
    }

    pub(super) fn sync_folder(&self, path: &Path) -> Result<(), CheckpointError> {
        self.run(DiskOperation::SyncFolder, "sync the folder", path, || {
            if cfg!(unix) {
                File::open(path)?.sync_all()
            } else {
                // Other systems cannot open a folder, but their renames are durable on return.
                Ok(())
            }
        })
    }

    pub(super) fn remove_file(&self, path: &Path) -> Result<(), CheckpointError> {
        self.run(DiskOperation::Remove, "remove", path, || {
            fs::remove_file(path)
        })
    }

    /// Removes the file or the folder at `path`, if it exists. Links, including links inside the folder, are
    /// removed and never followed.
    pub(super) fn remove(&self, path: &Path) -> Result<(), CheckpointError> {
        let found = match fs::symlink_metadata(path) {
            Ok(found) => found,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(CheckpointError::io("remove", path, error)),
        };
        if !found.is_dir() {
            let to = fs::read_link(path);
            self.remove_file(path)?;
            if let Ok(to) = to {
                let (path, to) = (path.display(), to.display());
                tracing::warn!("removed the link {path}; its target {to} was not changed");
            }
            return Ok(());
        }
        if self.hook.is_some() {
            self.remove_one_by_one(path)?;
        }
        // `remove_dir_all` does not follow links, even if a folder is replaced by a link in the meantime.
        let remove = || fs::remove_dir_all(path);
        self.run(DiskOperation::Remove, "remove the folder", path, remove)
    }

    /// Empties a folder file by file, so that a hook can fail any removal.
    fn remove_one_by_one(&self, folder: &Path) -> Result<(), CheckpointError> {
        names(folder)?
            .iter()
            .try_for_each(|name| self.remove(&folder.join(name)))
    }
}

/// The error message for a link in place of a file.
const LINK: &str = "it is a link, and links are not followed here: replace it by the file itself";

/// The error message for a folder, a pipe or a device in place of a file.
const NOT_A_FILE: &str = "it is not a regular file";

/// Opens a file of a checkpoint for reading. Returns an error if the path is a link or not a regular file, for example
/// a pipe.
pub(super) fn open_to_read(path: &Path) -> Result<File, CheckpointError> {
    check_is_file(path)?;
    let opened = not_following(OpenOptions::new().read(true)).open(path);
    let mut file = opened.map_err(|error| CheckpointError::io("open", path, error))?;
    check_not_lfs_pointer(&mut file).map_err(|error| CheckpointError::io("read", path, error))?;
    Ok(file)
}

/// Returns the size of a regular file. Returns an error if the path is a link.
pub(super) fn check_is_file(path: &Path) -> Result<u64, CheckpointError> {
    let found =
        fs::symlink_metadata(path).map_err(|error| CheckpointError::io("open", path, error))?;
    if found.is_symlink() {
        // Its target may be intact.
        return Err(CheckpointError::io("open", path, io::Error::other(LINK)));
    }
    if !found.is_file() {
        return Err(CheckpointError::corrupt(path, NOT_A_FILE));
    }
    Ok(found.len())
}

/// Makes `open` fail for a link, and return immediately for a pipe.
fn not_following(options: &mut OpenOptions) -> &mut OpenOptions {
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(options, libc::O_NOFOLLOW | libc::O_NONBLOCK);
    options
}

/// Returns the parent folder of a path.
fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) => parent,
        None => path,
    }
}

/// Returns the names in a folder, sorted. Names that are not UTF-8 are omitted.
pub(super) fn names(folder: &Path) -> Result<Vec<String>, CheckpointError> {
    let entries = fs::read_dir(folder)
        .and_then(|entries| entries.collect::<io::Result<Vec<_>>>())
        .map_err(|error| CheckpointError::io("list", folder, error))?;
    let mut names: Vec<_> = entries
        .into_iter()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort();
    Ok(names)
}

/// A file that is being written.
pub(super) struct DiskFile {
    disk: Disk,
    path: PathBuf,
    file: File,
}

impl DiskFile {
    pub(super) fn file(&self) -> &File {
        &self.file
    }

    pub(super) fn into_file(self) -> File {
        self.file
    }

    /// Truncates the file.
    pub(super) fn clear(&mut self) -> io::Result<()> {
        self.disk.before(DiskOperation::Write, &self.path)?;
        self.file.set_len(0)?;
        self.file.rewind()
    }

    /// Syncs the file.
    pub(super) fn sync(&self) -> Result<(), CheckpointError> {
        let sync = || self.file.sync_all();
        self.disk.run(DiskOperation::Sync, "sync", &self.path, sync)
    }
}

impl Write for DiskFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let most = self.disk.largest_write.unwrap_or(usize::MAX);
        self.disk.before(DiskOperation::Write, &self.path)?;
        self.file.write(&bytes[..bytes.len().min(most)])
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}
