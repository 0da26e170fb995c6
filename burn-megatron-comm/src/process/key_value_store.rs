//! A store in which ranks exchange small values before they have a communicator.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::CommError;

/// The longest interval between two reads of a folder, which may be on a network file system.
const MAX_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Values by key, shared by all ranks of a world. A key is posted once.
pub(crate) trait KeyValueStore: fmt::Debug + Send + Sync {
    /// Posts `value` under `key`.
    ///
    /// # Errors
    /// [`CommError::Engine`] if the store cannot be reached, or if the key exists.
    fn post(&self, key: &str, value: &[u8]) -> Result<(), CommError>;

    /// The value of `key`. Waits until a rank has posted it.
    ///
    /// # Errors
    /// [`CommError::Engine`] if it was not posted within `timeout`.
    fn read(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, CommError>;
}

/// A store in a folder that all ranks can access.
///
/// Every key is a file. It is written under another name and then renamed, so that a reader never sees a
/// part of it. Values are not removed, so every run needs an id of its own.
#[derive(Debug)]
pub(crate) struct FileStore {
    folder: PathBuf,
}

impl FileStore {
    /// The store of the run `run` in `folder`, which is created if it does not exist.
    ///
    /// # Errors
    /// [`CommError::Engine`] if the folder cannot be created, or if its mode gives access to other users.
    pub fn open(folder: &Path, run: &str) -> Result<Self, CommError> {
        let folder = folder.join(format!("burn-megatron-{}", file_name(run)));
        let cannot_create = |error: std::io::Error| {
            failed(format!(
                "cannot create the folder {}: {error}",
                folder.display()
            ))
        };
        create_private(&folder).map_err(cannot_create)?;
        Ok(Self { folder })
    }

    fn path(&self, key: &str) -> PathBuf {
        self.folder.join(file_name(key))
    }
}

impl KeyValueStore for FileStore {
    fn post(&self, key: &str, value: &[u8]) -> Result<(), CommError> {
        let path = self.path(key);
        // File names of keys have no dot. The name has the key, not the process id: two hosts may share an id.
        let temporary = self.folder.join(format!(".{}", file_name(key)));
        let failed = |error: std::io::Error| {
            failed(format!(
                "cannot post the key \"{key}\" as {}: {error}; each run needs an id of its own",
                path.display()
            ))
        };
        // Renaming would replace it. Two ranks never post the same key, so this check suffices.
        if path.exists() {
            return Err(failed(std::io::ErrorKind::AlreadyExists.into()));
        }
        fs::write(&temporary, value)
            .and_then(|()| fs::rename(&temporary, &path))
            .map_err(failed)
    }

    fn read(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, CommError> {
        let (path, began) = (self.path(key), Instant::now());
        let mut pause = Duration::from_millis(1);
        loop {
            match fs::read(&path) {
                Ok(value) => return Ok(value),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => {
                    return Err(failed(format!(
                        "cannot read the key \"{key}\" from {}: {error}",
                        path.display()
                    )));
                }
            }
            let left = timeout.saturating_sub(began.elapsed());
            if left.is_zero() {
                return Err(failed(format!(
                    "no rank has posted the key \"{key}\" in {1} within {0:.1} s; all ranks need \
                     access to this folder and the same run id",
                    began.elapsed().as_secs_f64(),
                    self.folder.display()
                )));
            }
            thread::sleep(pause.min(left));
            pause = (pause * 2).min(MAX_POLL_INTERVAL);
        }
    }
}

/// Creates the folder with mode 0700: who can read or post an id of NCCL can join a run.
#[cfg(unix)]
fn create_private(folder: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::{DirBuilderExt, PermissionsExt};

    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)?;
    let mode = fs::metadata(folder)?.permissions().mode() & 0o7777;
    if mode & 0o077 == 0 {
        return Ok(());
    }
    Err(std::io::Error::new(
        std::io::ErrorKind::PermissionDenied,
        format!(
            "invalid mode {mode:04o}: expected 0700; run chmod 700 {}",
            folder.display()
        ),
    ))
}

#[cfg(not(unix))]
fn create_private(folder: &Path) -> std::io::Result<()> {
    fs::create_dir_all(folder)
}

fn failed(message: String) -> CommError {
    CommError::Engine {
        engine: "file store".into(),
        message,
    }
}

/// Letters, digits and `-` stay, every other byte becomes `_` and two digits: names are unique.
fn file_name(key: &str) -> String {
    let part = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' => char::from(byte).to_string(),
        _ => format!("_{byte:02x}"),
    };
    key.bytes().map(part).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Barrier};
    use std::{env, process};

    use super::*;

    fn store(name: &str) -> (PathBuf, FileStore) {
        let folder = env::temp_dir().join(format!("store-{name}-{}", process::id()));
        let _ = fs::remove_dir_all(&folder);
        let store = FileStore::open(&folder, "run 1").unwrap();
        (folder, store)
    }

    #[test]
    fn what_is_posted_is_read_by_all() {
        let (folder, store) = store("all");
        let store = Arc::new(store);
        let readers: Vec<_> = (0..4)
            .map(|rank| {
                let store = store.clone();
                let key = format!("ids/{}", rank % 2);
                thread::spawn(move || store.read(&key, Duration::from_secs(60)))
            })
            .collect();
        thread::sleep(Duration::from_millis(20));
        let value = vec![7u8; 100_000];
        store.post("ids/0", &value).unwrap();
        store.post("ids/1", b"").unwrap();
        for (rank, reader) in readers.into_iter().enumerate() {
            let expected = if rank % 2 == 0 { value.clone() } else { vec![] };
            assert_eq!(reader.join().unwrap(), Ok(expected));
        }
        // No temporary files are left.
        let left = fs::read_dir(folder.join("burn-megatron-run_201")).unwrap();
        assert_eq!(left.count(), 2);
        fs::remove_dir_all(folder).unwrap();
    }

    /// Each rank has a store of its own over the same folder.
    #[test]
    fn ranks_may_post_at_the_same_time() {
        let (folder, _board) = store("ranks");
        let start = Barrier::new(8);
        thread::scope(|scope| {
            for rank in 0..8u8 {
                let (start, folder) = (&start, &folder);
                scope.spawn(move || {
                    let store = FileStore::open(folder, "run 1").unwrap();
                    for round in 0..50 {
                        start.wait();
                        let key = |rank: u8| format!("{round}/{rank}");
                        store.post(&key(rank), &[rank; 100]).unwrap();
                        let other = (rank + 1) % 8;
                        let value = store.read(&key(other), Duration::from_secs(60));
                        assert_eq!(value.unwrap(), [other; 100]);
                    }
                });
            }
        });
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn what_is_never_posted_is_named() {
        let (folder, store) = store("never");
        let message = store
            .read("world", Duration::from_millis(30))
            .unwrap_err()
            .to_string();
        for part in ["0.0 s", "\"world\"", "burn-megatron-run_201", "run id"] {
            assert!(message.contains(part), "{message:?} does not name {part:?}");
        }
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_key_is_posted_once() {
        let (folder, store) = store("once");
        store.post("a", b"1").unwrap();
        let message = store.post("a", b"2").unwrap_err().to_string();
        assert!(message.contains("\"a\"") && message.contains("an id of its own"));
        assert_eq!(store.read("a", Duration::ZERO).unwrap(), b"1");
        // Other keys, though a file system may take some characters for separators.
        for key in ["a/b", "a_b", "a.b", ".a", "ä"] {
            store.post(key, key.as_bytes()).unwrap();
            assert_eq!(store.read(key, Duration::ZERO).unwrap(), key.as_bytes());
        }
        fs::remove_dir_all(folder).unwrap();
    }

    #[cfg(unix)]
    #[test]
    fn a_folder_that_is_open_to_others_is_refused() {
        use std::os::unix::fs::PermissionsExt;

        let (folder, _board) = store("open");
        let inner = folder.join("burn-megatron-run_201");
        let mode = |mode| fs::set_permissions(&inner, fs::Permissions::from_mode(mode)).unwrap();
        let made = fs::metadata(&inner).unwrap().permissions().mode();
        assert_eq!(made & 0o777, 0o700);
        mode(0o755);
        let message = FileStore::open(&folder, "run 1").unwrap_err().to_string();
        assert!(
            message.ends_with(&format!("chmod 700 {}", inner.display())),
            "{message}"
        );
        mode(0o700);
        assert!(FileStore::open(&folder, "run 1").is_ok());
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_folder_that_cannot_be_created_is_named() {
        let (folder, _board) = store("refused");
        let file = folder.join("file");
        fs::write(&file, b"").unwrap();
        let message = FileStore::open(&file, "x").unwrap_err().to_string();
        assert!(message.contains(&file.display().to_string()), "{message}");
        fs::remove_dir_all(folder).unwrap();
    }
}
