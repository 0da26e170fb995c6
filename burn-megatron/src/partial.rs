//! Files and folders in the making, beside what they become.
//!
//! What takes long is written as `NAME.UNIQUE.partial`, and gets its name when it is whole. Whoever writes
//! it holds a lock on it, which the operating system frees when the process is gone, however it ended. So
//! what a killed process has left is known for that, and goes when the next one begins the same.

use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// The ending of what is not whole.
const ENDING: &str = ".partial";

/// A file or a folder in the making; removed unless it is published.
#[derive(Debug)]
pub struct Partial {
    path: PathBuf,
    to: PathBuf,
    published: bool,
    /// Has the lock. Of a folder there is none where the operating system opens no folders.
    _held: Option<File>,
}

impl Partial {
    /// A new file that is to become `to`, and what it is written by.
    ///
    /// # Errors
    ///
    /// What the operating system says.
    pub fn file(to: &Path) -> io::Result<(Self, File)> {
        loop {
            let path = begin(to)?;
            let file = File::create_new(&path)?;
            // The clone has the same lock, which lasts as long as both.
            if let Some(partial) = Self::held(path, to, Some(file.try_clone()?)) {
                return Ok((partial, file));
            }
        }
    }

    /// A new folder that is to become `to`.
    ///
    /// # Errors
    ///
    /// What the operating system says.
    pub fn folder(to: &Path) -> io::Result<Self> {
        loop {
            let path = begin(to)?;
            fs::create_dir(&path)?;
            let folder = cfg!(unix).then(|| File::open(&path)).transpose();
            // Another process may have taken it for something left before it was locked.
            let Ok(folder) = folder else { continue };
            if let Some(partial) = Self::held(path, to, folder) {
                return Ok(partial);
            }
        }
    }

    /// Locks what was just made, unless another process has taken it for something left meanwhile.
    fn held(path: PathBuf, to: &Path, file: Option<File>) -> Option<Self> {
        if let Some(Err(TryLockError::WouldBlock)) = file.as_ref().map(File::try_lock) {
            return None;
        }
        // Where nothing can be locked, nothing is taken for left either.
        path.exists().then(|| Self {
            path,
            to: to.to_path_buf(),
            published: false,
            _held: file,
        })
    }

    /// Where it is until it is published.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Gives it its name.
    ///
    /// # Errors
    ///
    /// What the operating system says; then it is removed.
    pub fn publish(mut self) -> io::Result<()> {
        fs::rename(&self.path, &self.to)?;
        self.published = true;
        Ok(())
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.published {
            // Nobody can be told of an error here.
            remove(&self.path);
        }
    }
}

/// Writes all of a file, in place of what is there: whoever looks, and whenever the machine stops, finds the old
/// bytes or the new ones. The file keeps its rights; of a link what it points to is replaced. A device or a pipe
/// is written to.
///
/// # Errors
///
/// What the operating system says; then the old file is as it was.
pub fn replace_file(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let there = fs::metadata(path).ok();
    let to = match &there {
        Some(there) if !there.is_file() => return fs::write(path, bytes),
        Some(_) => path.canonicalize()?,
        None => path.to_path_buf(),
    };
    let (partial, mut file) = Partial::file(&to)?;
    if let Some(there) = there {
        file.set_permissions(there.permissions())?;
    }
    file.write_all(bytes)?;
    file.sync_all()?;
    partial.publish()?;
    sync_folder_of(&to)
}

/// Waits until the names in a folder are on disk.
///
/// # Errors
///
/// What the operating system says.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    match cfg!(unix) {
        true => File::open(folder)?.sync_all(),
        // Elsewhere a folder cannot be opened, and its names are on disk when they are given.
        false => Ok(()),
    }
}

/// Waits until the name of a file or a folder is on disk.
///
/// # Errors
///
/// What the operating system says.
pub fn sync_folder_of(path: &Path) -> io::Result<()> {
    sync_folder(folder(path))
}

/// The folder that a path lies in.
fn folder(of: &Path) -> &Path {
    let folder = of.parent().filter(|folder| !folder.as_os_str().is_empty());
    folder.unwrap_or(Path::new("."))
}

/// The path of something new that is to become `to`; what killed processes left of it is removed.
fn begin(to: &Path) -> io::Result<PathBuf> {
    let Some(name) = to.file_name() else {
        let what = format!("{} names nothing", to.display());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    };
    let mut start = name.to_os_string();
    start.push(".");
    sweep(to, &start);
    start.push(unique_name());
    start.push(ENDING);
    Ok(to.with_file_name(start))
}

/// Removes what nobody holds of the files beside `to` whose names begin with `start`. What cannot be looked
/// at or removed stays: it is in nobody's way. So does a link, which nobody makes here.
fn sweep(to: &Path, start: &OsString) {
    let entries = fs::read_dir(folder(to));
    for entry in entries.into_iter().flatten().flatten() {
        let name = entry.file_name();
        let rest = name
            .as_encoded_bytes()
            .strip_prefix(start.as_encoded_bytes());
        let unique = rest.and_then(|rest| rest.strip_suffix(ENDING.as_bytes()));
        // With a dot it is of another name, which is longer.
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
    let _ = match path.is_dir() {
        true => fs::remove_dir_all(path),
        false => fs::remove_file(path),
    };
}

/// A part of a name that no other process has, on this machine or on another.
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
    use crate::data::test_folder::TestFolder;

    fn names(folder: &TestFolder) -> Vec<String> {
        let entries = fs::read_dir(folder.path()).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.collect();
        names.sort();
        names
    }

    #[test]
    fn what_is_whole_has_its_name_and_what_is_not_goes() {
        let folder = TestFolder::new("partial-whole");
        let to = folder.path().join("a.bin");
        let (partial, mut file) = Partial::file(&to).unwrap();
        file.write_all(b"whole").unwrap();
        assert!(partial.path().is_file() && !to.exists());
        partial.publish().unwrap();
        assert_eq!(fs::read(&to).unwrap(), b"whole");
        drop(Partial::file(&to).unwrap());
        let of = folder.path().join("b");
        let partial = Partial::folder(&of).unwrap();
        fs::write(partial.path().join("inside"), "x").unwrap();
        drop(partial);
        Partial::folder(&of).unwrap().publish().unwrap();
        assert_eq!(names(&folder), ["a.bin", "b"]);
    }

    #[test]
    fn what_a_killed_process_left_goes_and_what_a_live_one_makes_stays() {
        let folder = TestFolder::new("partial-killed");
        let to = folder.path().join("a.bin");
        // A file and a folder that nobody holds, and what is of other names.
        folder.write("a.bin.5f-1-0.partial", "left");
        folder.write("a.bin.60-1-0.partial/inside/deep", "left");
        let others = [
            "a.bin.c.5f-1-0.partial",
            "a.bin.old",
            "b.a.bin.5f-1-0.partial",
        ];
        others.iter().for_each(|name| folder.write(name, "other"));
        let (live, _file) = Partial::file(&to).unwrap();
        let live_folder = Partial::folder(&to).unwrap();
        let (second, _file) = Partial::file(&to).unwrap();
        let made = [&live, &live_folder, &second].map(|partial| {
            let name = partial.path().file_name().unwrap();
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
        assert!(Partial::file(Path::new("/")).is_err());
        assert!(Partial::folder(Path::new("a/..")).is_err());
        assert!(Partial::file(Path::new("/nowhere/at/all")).is_err());
    }

    /// Where the bytes of the old file are not written over, another name of it still has them.
    #[cfg(unix)]
    #[test]
    fn a_file_is_replaced_and_not_written_over() {
        use std::os::unix::fs::{PermissionsExt, symlink};

        let folder = TestFolder::new("partial-replaced");
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
        // What is no file is not replaced by one.
        replace_file(Path::new("/dev/null"), b"gone").unwrap();
        assert!(!fs::metadata("/dev/null").unwrap().is_file());
        assert!(replace_file(folder.path(), b"x").is_err());
    }

    #[cfg(unix)]
    #[test]
    fn a_link_named_as_something_left_is_left_alone() {
        let folder = TestFolder::new("partial-link");
        folder.write("victim/data", "precious");
        let link = folder.path().join("a.bin.5f-1-0.partial");
        std::os::unix::fs::symlink(folder.path().join("victim"), &link).unwrap();
        drop(Partial::file(&folder.path().join("a.bin")).unwrap());
        assert_eq!(names(&folder), ["a.bin.5f-1-0.partial", "victim"]);
        assert!(folder.path().join("victim/data").is_file());
    }
}
