//! Every change of the file system that a save makes, so that a test can stop one at any of them.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::CheckpointError;

/// A change of the file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// A new folder.
    CreateFolder,
    /// A new file.
    Create,
    /// Bytes at the end of a file.
    Write,
    /// All bytes of a file reach the disk.
    Sync,
    /// All names of a folder reach the disk.
    SyncFolder,
    /// A file or a folder gets another name.
    Rename,
    /// A file or an empty folder goes.
    Remove,
}

type Hook = dyn Fn(Operation, &Path) -> io::Result<()> + Send + Sync;

/// The file system that checkpoints are written to.
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
    /// A disk for tests: `hook` is called before each change, and its error takes the place of the change.
    /// Nothing larger than `largest_write` bytes is written at once, so that a file can stay half.
    pub fn hooked(
        hook: impl Fn(Operation, &Path) -> io::Result<()> + Send + Sync + 'static,
        largest_write: usize,
    ) -> Self {
        Self {
            hook: Some(Arc::new(hook)),
            largest_write: Some(largest_write.max(1)),
        }
    }

    fn before(&self, operation: Operation, path: &Path) -> io::Result<()> {
        match &self.hook {
            Some(hook) => hook(operation, path),
            None => Ok(()),
        }
    }

    /// Creates a folder, and those above it; their names are on the disk then.
    pub(super) fn create_folders(&self, path: &Path) -> Result<(), CheckpointError> {
        if path.is_dir() {
            return Ok(());
        }
        let parent = parent(path);
        self.create_folders(parent)?;
        let result = self.before(Operation::CreateFolder, path);
        match result.and_then(|()| fs::create_dir(path)) {
            Err(_)
                if let Ok(to) = fs::read_link(path)
                    && !path.is_dir() =>
            {
                let to = to.display();
                let what =
                    format!("it is a link to {to}, and no folder is there: is its disk mounted?");
                return Err(CheckpointError::corrupt(path, what));
            }
            // Another process was first.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => {}
            result => {
                result.map_err(|error| CheckpointError::io("create the folder", path, error))?;
            }
        }
        self.sync_folder(parent)
    }

    /// Creates a file that is not there yet.
    pub(super) fn create(&self, path: &Path) -> Result<DiskFile, CheckpointError> {
        self.open(path, OpenOptions::new().create_new(true))
    }

    /// Opens a file as it is, or creates it. A link is not followed: what it points to would be written to.
    pub(super) fn open_or_create(&self, path: &Path) -> Result<DiskFile, CheckpointError> {
        if fs::symlink_metadata(path).is_ok_and(|found| found.is_symlink()) {
            return Err(CheckpointError::corrupt(path, LINK));
        }
        self.open(path, not_following(OpenOptions::new().create(true)))
    }

    fn open(&self, path: &Path, options: &mut OpenOptions) -> Result<DiskFile, CheckpointError> {
        let result = self.before(Operation::Create, path);
        let result = result.and_then(|()| options.read(true).write(true).open(path));
        let file = result.map_err(|error| CheckpointError::io("create", path, error))?;
        Ok(DiskFile {
            disk: self.clone(),
            path: path.to_path_buf(),
            file,
        })
    }

    /// Writes all of a file, of which never a half is to be seen under its name.
    pub(super) fn replace(&self, path: &Path, bytes: &[u8]) -> Result<(), CheckpointError> {
        let folder = parent(path);
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let new = folder.join(format!(".new-{name}"));
        self.remove(&new)?;
        let mut file = self.create(&new)?;
        let written = file.write_all(bytes);
        written.map_err(|source| CheckpointError::Write {
            path: new.clone(),
            total: bytes.len() as u64,
            source,
        })?;
        file.sync()?;
        self.rename(&new, path)?;
        self.sync_folder(folder)
    }

    pub(super) fn rename(&self, from: &Path, to: &Path) -> Result<(), CheckpointError> {
        let result = self.before(Operation::Rename, from);
        let result = result.and_then(|()| fs::rename(from, to));
        result.map_err(|error| CheckpointError::io("rename", from, error))
    }

    pub(super) fn sync_folder(&self, path: &Path) -> Result<(), CheckpointError> {
        let result = self.before(Operation::SyncFolder, path);
        let result = result.and_then(|()| match cfg!(unix) {
            true => File::open(path)?.sync_all(),
            // Elsewhere a folder is no file, and its names are on the disk when they are given.
            false => Ok(()),
        });
        result.map_err(|error| CheckpointError::io("sync the folder", path, error))
    }

    pub(super) fn remove_file(&self, path: &Path) -> Result<(), CheckpointError> {
        let result = self.before(Operation::Remove, path);
        let result = result.and_then(|()| fs::remove_file(path));
        result.map_err(|error| CheckpointError::io("remove", path, error))
    }

    /// Removes what is at `path`, if anything: a file, or a folder and all in it. Of a link only the link
    /// goes, there and in the folder, and never what it points to.
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
                tracing::warn!("{path} was a link: it is removed, and {to} stays as it is");
            }
            return Ok(());
        }
        if self.hook.is_some() {
            self.remove_one_by_one(path)?;
        }
        let result = self.before(Operation::Remove, path);
        // It follows no link, not even one that takes the place of a folder meanwhile.
        let result = result.and_then(|()| fs::remove_dir_all(path));
        result.map_err(|error| CheckpointError::io("remove the folder", path, error))
    }

    /// Empties a folder, so that a test can stop between any two removals.
    fn remove_one_by_one(&self, folder: &Path) -> Result<(), CheckpointError> {
        names(folder)?
            .iter()
            .try_for_each(|name| self.remove(&folder.join(name)))
    }
}

/// What is said of a link where a file should be.
const LINK: &str = "it is a link, which is not followed here: put the file itself in its place";

/// Opens a file in the folder of a checkpoint to read it. A link is not followed, and what is no file, such as
/// a pipe, is not waited for.
pub(super) fn open_to_read(path: &Path) -> Result<File, CheckpointError> {
    check_is_file(path)?;
    let opened = not_following(OpenOptions::new().read(true)).open(path);
    opened.map_err(|error| CheckpointError::io("open", path, error))
}

/// Whether this is a file, and no link to one; its size.
pub(super) fn check_is_file(path: &Path) -> Result<u64, CheckpointError> {
    let found = fs::symlink_metadata(path);
    let found = found.map_err(|error| CheckpointError::io("open", path, error))?;
    if found.is_symlink() {
        // What it points to may be whole.
        return Err(CheckpointError::io("open", path, io::Error::other(LINK)));
    }
    if !found.is_file() {
        return Err(CheckpointError::corrupt(path, "it is no file"));
    }
    Ok(found.len())
}

/// Lets no link be followed in the last place of a path, not even one that has just been put there.
fn not_following(options: &mut OpenOptions) -> &mut OpenOptions {
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(options, libc::O_NOFOLLOW);
    options
}

/// The folder that a path lies in.
fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) => parent,
        None => path,
    }
}

/// The names in a folder, sorted. What is no text is not ours.
pub(super) fn names(folder: &Path) -> Result<Vec<String>, CheckpointError> {
    let entries = fs::read_dir(folder).and_then(|entries| entries.collect::<io::Result<Vec<_>>>());
    let entries = entries.map_err(|error| CheckpointError::io("list", folder, error))?;
    let names = entries.into_iter();
    let names = names.filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<_> = names.collect();
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

    /// Empties it.
    pub(super) fn clear(&mut self) -> io::Result<()> {
        self.disk.before(Operation::Write, &self.path)?;
        self.file.set_len(0)?;
        self.file.rewind()
    }

    /// Waits until all of it is on the disk.
    pub(super) fn sync(&self) -> Result<(), CheckpointError> {
        let result = self.disk.before(Operation::Sync, &self.path);
        let result = result.and_then(|()| self.file.sync_all());
        result.map_err(|error| CheckpointError::io("sync", &self.path, error))
    }
}

impl Write for DiskFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let most = self.disk.largest_write.unwrap_or(usize::MAX);
        self.disk.before(Operation::Write, &self.path)?;
        self.file.write(&bytes[..bytes.len().min(most)])
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}
