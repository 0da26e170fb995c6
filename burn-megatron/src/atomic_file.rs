//! Atomic writes of files and folders. A new file or folder is staged next to its destination and then renamed.
//!
//! A staged path is named `NAME.UNIQUE.partial`. The process that writes it holds a lock on it, which the operating
//! system releases when the process ends for any reason. A staged path without a lock therefore belongs to a killed
//! process. It is removed when the same destination is staged again.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::regular_file::open_output;

/// The suffix of staged paths.
const SUFFIX: &str = ".partial";

/// A staged file or folder. It is removed on drop unless it is published.
#[derive(Debug)]
pub struct StagedPath {
    path: PathBuf,
    to: PathBuf,
    published: bool,
    /// Holds the lock. `None` for a folder if the operating system cannot open folders.
    _lock: Option<File>,
}

impl StagedPath {
    /// Stages a new file that will become `to`, and opens it for writing.
    ///
    /// # Errors
    ///
    /// Errors of the operating system.
    pub fn file(to: &Path) -> io::Result<(Self, File)> {
        loop {
            let path = staging_path(to)?;
            let file = File::create_new(&path)?;
            // The clone shares the lock.
            if let Some(staged) = Self::locked(path, to, Some(file.try_clone()?)) {
                return Ok((staged, file));
            }
        }
    }

    /// Stages a new folder that will become `to`.
    ///
    /// # Errors
    ///
    /// Errors of the operating system.
    pub fn folder(to: &Path) -> io::Result<Self> {
        loop {
            let path = staging_path(to)?;
            fs::create_dir(&path)?;
            let folder = cfg!(unix).then(|| File::open(&path)).transpose();
            // Another process may have removed it as stale before it was locked.
            let Ok(folder) = folder else { continue };
            if let Some(staged) = Self::locked(path, to, folder) {
                return Ok(staged);
            }
        }
    }

    /// Locks a new staged path. Returns `None` if another process has already removed it as stale.
    fn locked(path: PathBuf, to: &Path, file: Option<File>) -> Option<Self> {
        if let Some(Err(TryLockError::WouldBlock)) = file.as_ref().map(File::try_lock) {
            return None;
        }
        // If locks are not supported, nothing is considered stale either.
        path.exists().then(|| Self {
            path,
            to: to.to_path_buf(),
            published: false,
            _lock: file,
        })
    }

    /// Returns the path of the staged file or folder, which is valid until it is published.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Publishes the staged file or folder: renames it to its destination.
    ///
    /// # Errors
    ///
    /// Errors of the operating system. After an error the staged path is removed.
    pub fn publish(mut self) -> io::Result<()> {
        fs::rename(&self.path, &self.to)?;
        self.published = true;
        Ok(())
    }
}

impl Drop for StagedPath {
    fn drop(&mut self) {
        if !self.published {
            // Errors cannot be returned from drop.
            remove(&self.path);
        }
    }
}

/// Replaces the content of a file atomically: readers see either the old or the new bytes, even after a crash.
/// Permissions are kept. If `path` is a link, its target is replaced. If it is a device or a pipe, the bytes
/// are written to it.
///
/// ```
/// use burn_megatron::atomic_file::replace_file;
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("state.json");
/// replace_file(&path, b"{}")?;
/// replace_file(&path, b"{\"step\": 1}")?;
/// assert_eq!(std::fs::read_to_string(&path)?, "{\"step\": 1}");
/// # Ok::<(), std::io::Error>(())
/// ```
///
/// # Errors
///
/// Errors of the operating system. After an error the old file is unchanged.
pub fn replace_file(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let there = fs::metadata(path).ok();
    let to = match &there {
        Some(there) if !there.is_file() => {
            let mut options = File::options();
            return open_output(path, options.write(true).truncate(true))?.write_all(bytes);
        }
        Some(_) => path.canonicalize()?,
        None => path.to_path_buf(),
    };
    let (staged, mut file) = StagedPath::file(&to)?;
    if let Some(there) = there {
        file.set_permissions(there.permissions())?;
    }
    file.write_all(bytes)?;
    file.sync_all()?;
    staged.publish()?;
    sync_folder_of(&to)
}

/// Syncs the directory entries of a folder to disk (`fsync`), so that renames in it survive a crash.
///
/// # Errors
///
/// Errors of the operating system.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    if cfg!(unix) {
        File::open(folder)?.sync_all()
    } else {
        // Other systems cannot open a folder, but their renames are durable on return.
        Ok(())
    }
}

/// Syncs the directory entries of the parent folder of a path to disk (`fsync`).
///
/// # Errors
///
/// Errors of the operating system.
pub fn sync_folder_of(path: &Path) -> io::Result<()> {
    sync_folder(folder(path))
}

/// Returns the parent folder of a path.
fn folder(of: &Path) -> &Path {
    let folder = of.parent().filter(|folder| !folder.as_os_str().is_empty());
    folder.unwrap_or(Path::new("."))
}

/// Returns a new staged path for `to`, and removes stale staged paths of `to`.
fn staging_path(to: &Path) -> io::Result<PathBuf> {
    let Some(name) = to.file_name() else {
        let what = format!("{} has no file name", to.display());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    };
    let mut start = name.to_os_string();
    start.push(".");
    remove_stale(to, &start);
    start.push(unique_name());
    start.push(SUFFIX);
    Ok(to.with_file_name(start))
}

/// Removes files next to `to` whose names begin with `start` and that no process has locked. Files that cannot
/// be opened or removed are left. Links are also left, because they are never staged.
fn remove_stale(to: &Path, start: &OsString) {
    let entries = fs::read_dir(folder(to));
    for entry in entries.into_iter().flatten().flatten() {
        let name = entry.file_name();
        let rest = name
            .as_encoded_bytes()
            .strip_prefix(start.as_encoded_bytes());
        let unique = rest.and_then(|rest| rest.strip_suffix(SUFFIX.as_bytes()));
        // A name with another dot belongs to another destination, which has a longer name.
        let ours = unique.is_some_and(|unique| !unique.contains(&b'.'));
        let kind = entry.file_type();
        if ours && kind.is_ok_and(|kind| kind.is_file() || kind.is_dir()) {
            let path = entry.path();
            let left = File::open(&path)
                .ok()
                .filter(|file| file.try_lock().is_ok());
            if left.is_some() {
                remove(&path);
            }
        }
    }
}

fn remove(path: &Path) {
    let _ = if path.is_dir() {
        fs::remove_dir_all(path)
    } else {
        fs::remove_file(path)
    };
}

/// Whether a file name is the name of a [`StagedPath`]. Such a path is being written, or the process that wrote it was
/// killed.
pub fn is_staged(name: &OsStr) -> bool {
    name.as_encoded_bytes().ends_with(SUFFIX.as_bytes())
}

/// Returns a part of a name that is unique over processes and machines.
fn unique_name() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let nanoseconds = since.map_or(0, |since| since.as_nanos());
    format!("{nanoseconds:x}-{}-{count}", process::id())
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_megatron_test_support::TestFolder;

    fn names(folder: &TestFolder) -> Vec<String> {
        let entries = fs::read_dir(folder.path()).unwrap();
        let mut names: Vec<_> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn what_is_whole_has_its_name_and_what_is_not_goes() {
        let folder = TestFolder::new();
        let to = folder.path().join("a.bin");
        let (staged, mut file) = StagedPath::file(&to).unwrap();
        file.write_all(b"whole").unwrap();
        assert!(staged.path().is_file() && !to.exists());
        staged.publish().unwrap();
        assert_eq!(fs::read(&to).unwrap(), b"whole");
        drop(StagedPath::file(&to).unwrap());
        let of = folder.path().join("b");
        let staged = StagedPath::folder(&of).unwrap();
        fs::write(staged.path().join("inside"), "x").unwrap();
        drop(staged);
        StagedPath::folder(&of).unwrap().publish().unwrap();
        assert_eq!(names(&folder), ["a.bin", "b"]);
    }

    #[test]
    fn what_a_killed_process_left_goes_and_what_a_live_one_makes_stays() {
        let folder = TestFolder::new();
        let to = folder.path().join("a.bin");
        // A file and a folder that no process has locked, and files with other names.
        folder.write("a.bin.5f-1-0.partial", "left");
        folder.write("a.bin.60-1-0.partial/inside/deep", "left");
        let others = [
            "a.bin.c.5f-1-0.partial",
            "a.bin.old",
            "b.a.bin.5f-1-0.partial",
        ];
        others.iter().for_each(|name| folder.write(name, "other"));
        let (live, _file) = StagedPath::file(&to).unwrap();
        let live_folder = StagedPath::folder(&to).unwrap();
        let (second, _file) = StagedPath::file(&to).unwrap();
        let made = [&live, &live_folder, &second].map(|staged| {
            let name = staged.path().file_name().unwrap();
            name.to_str().unwrap().to_string()
        });
        let mut wanted: Vec<_> = others.map(String::from).into_iter().chain(made).collect();
        wanted.sort();
        assert_eq!(names(&folder), wanted);
        drop((live, live_folder, second));
        assert_eq!(names(&folder), others);
    }

    #[test]
    fn what_names_nothing_is_refused() {
        assert!(StagedPath::file(Path::new("/")).is_err());
        assert!(StagedPath::folder(Path::new("a/..")).is_err());
        assert!(StagedPath::file(Path::new("/nowhere/at/all")).is_err());
    }

    /// A hard link still has the old bytes, because they are not overwritten.
    #[cfg(unix)]
    #[test]
    fn a_file_is_replaced_and_not_written_over() {
        use std::os::unix::fs::{PermissionsExt, symlink};

        let folder = TestFolder::new();
        let at = |name: &str| folder.path().join(name);
        replace_file(&at("new"), b"first").unwrap();
        assert_eq!(fs::read(at("new")).unwrap(), b"first");
        let private = fs::Permissions::from_mode(0o600);
        fs::set_permissions(at("new"), private).unwrap();
        fs::hard_link(at("new"), at("old")).unwrap();
        symlink(at("new"), at("link")).unwrap();
        replace_file(&at("link"), b"second").unwrap();
        assert_eq!(fs::read(at("old")).unwrap(), b"first");
        assert_eq!(fs::read(at("new")).unwrap(), b"second");
        assert!(at("link").is_symlink());
        let mode = fs::metadata(at("new")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(names(&folder), ["link", "new", "old"]);
        // Anything but a regular file is not replaced by a regular file.
        replace_file(Path::new("/dev/null"), b"gone").unwrap();
        assert!(!fs::metadata("/dev/null").unwrap().is_file());
        assert!(replace_file(folder.path(), b"x").is_err());
    }

    #[cfg(unix)]
    #[test]
    fn a_link_named_as_something_left_is_left_alone() {
        let folder = TestFolder::new();
        folder.write("victim/data", "precious");
        let link = folder.path().join("a.bin.5f-1-0.partial");
        std::os::unix::fs::symlink(folder.path().join("victim"), &link).unwrap();
        drop(StagedPath::file(&folder.path().join("a.bin")).unwrap());
        assert_eq!(names(&folder), ["a.bin.5f-1-0.partial", "victim"]);
        assert!(folder.path().join("victim/data").is_file());
    }
}
