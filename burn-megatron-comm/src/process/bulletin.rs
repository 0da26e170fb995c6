//! A board on which ranks post small values for each other before they can communicate.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::CommError;

/// The longest sleep between two looks at a folder, which may lie on a network.
const LONGEST_NAP: Duration = Duration::from_millis(50);

/// Values by key, seen by every rank of a world. A key is posted once.
pub(crate) trait Bulletin: fmt::Debug + Send + Sync {
    /// Posts `value` under `key`.
    ///
    /// # Errors
    /// [`CommError::Engine`] if the board cannot be reached, or if the key is there already.
    fn post(&self, key: &str, value: &[u8]) -> Result<(), CommError>;

    /// The value of `key`; waits until some rank has posted it.
    ///
    /// # Errors
    /// [`CommError::Engine`] if it was not posted in time.
    fn read(&self, key: &str, patience: Duration) -> Result<Vec<u8>, CommError>;
}

/// A board in a folder that all ranks see.
///
/// Every key is a file. It is written under another name first and then renamed, so that nobody reads
/// half of it. Runs must have different ids: what a run posts stays there.
#[derive(Debug)]
pub(crate) struct FileBulletin {
    folder: PathBuf,
}

impl FileBulletin {
    /// The board of the run `run` in `folder`; made if it is not there.
    ///
    /// # Errors
    /// [`CommError::Engine`] if the folder cannot be made, or if others may write into it.
    pub fn open(folder: &Path, run: &str) -> Result<Self, CommError> {
        let folder = folder.join(format!("burn-megatron-{}", file_name(run)));
        let not_made = |error: std::io::Error| {
            failed(format!(
                "the folder {} cannot be made: {error}",
                folder.display()
            ))
        };
        make_private(&folder).map_err(not_made)?;
        Ok(Self { folder })
    }

    fn path(&self, key: &str) -> PathBuf {
        self.folder.join(file_name(key))
    }
}

impl Bulletin for FileBulletin {
    fn post(&self, key: &str, value: &[u8]) -> Result<(), CommError> {
        let path = self.path(key);
        // No key begins with a dot. The name is that of the key, as processes of two hosts may have one id.
        let draft = self.folder.join(format!(".{}", file_name(key)));
        let failed = |error: std::io::Error| {
            failed(format!(
                "the key \"{key}\" cannot be posted as {}: {error}; each run needs an id of its own",
                path.display()
            ))
        };
        // A renaming would replace it. Two ranks never post one key, so this is enough.
        if path.exists() {
            return Err(failed(std::io::ErrorKind::AlreadyExists.into()));
        }
        fs::write(&draft, value)
            .and_then(|()| fs::rename(&draft, &path))
            .map_err(failed)
    }

    fn read(&self, key: &str, patience: Duration) -> Result<Vec<u8>, CommError> {
        let (path, began) = (self.path(key), Instant::now());
        let mut nap = Duration::from_millis(1);
        loop {
            match fs::read(&path) {
                Ok(value) => return Ok(value),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => {
                    return Err(failed(format!(
                        "the key \"{key}\" cannot be read from {}: {error}",
                        path.display()
                    )));
                }
            }
            let left = patience.saturating_sub(began.elapsed());
            if left.is_zero() {
                return Err(failed(format!(
                    "after {:.1} s no rank has posted the key \"{key}\" in {}; all ranks must see \
                     this folder and be given the same run id",
                    began.elapsed().as_secs_f64(),
                    self.folder.display()
                )));
            }
            thread::sleep(nap.min(left));
            nap = (nap * 2).min(LONGEST_NAP);
        }
    }
}

/// Makes the folder for one user alone: who reads or posts an id of NCCL can join a run.
#[cfg(unix)]
fn make_private(folder: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::{DirBuilderExt, PermissionsExt};

    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)?;
    let mode = fs::metadata(folder)?.permissions().mode() & 0o7777;
    match mode & 0o077 {
        0 => Ok(()),
        _ => Err(std::io::Error::new(
            std::io::ErrorKind::PermissionDenied,
            format!(
                "it is there and open to others (mode {mode:04o}, expected 0700); close it: chmod 700 {}",
                folder.display()
            ),
        )),
    }
}

#[cfg(not(unix))]
fn make_private(folder: &Path) -> std::io::Result<()> {
    fs::create_dir_all(folder)
}

fn failed(message: String) -> CommError {
    CommError::Engine {
        engine: "bulletin".into(),
        message,
    }
}

/// Letters, digits and `-` stay, every other byte becomes `_` and two digits: no two keys have one name.
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

    fn board(name: &str) -> (PathBuf, FileBulletin) {
        let folder = env::temp_dir().join(format!("bulletin-{name}-{}", process::id()));
        let _ = fs::remove_dir_all(&folder);
        let board = FileBulletin::open(&folder, "run 1").unwrap();
        (folder, board)
    }

    #[test]
    fn what_is_posted_is_read_by_all() {
        let (folder, board) = board("all");
        let board = Arc::new(board);
        let readers: Vec<_> = (0..4)
            .map(|rank| {
                let board = board.clone();
                let key = format!("ids/{}", rank % 2);
                thread::spawn(move || board.read(&key, Duration::from_secs(60)))
            })
            .collect();
        thread::sleep(Duration::from_millis(20));
        let whole = vec![7u8; 100_000];
        board.post("ids/0", &whole).unwrap();
        board.post("ids/1", b"").unwrap();
        for (rank, reader) in readers.into_iter().enumerate() {
            let expected = if rank % 2 == 0 { whole.clone() } else { vec![] };
            assert_eq!(reader.join().unwrap(), Ok(expected));
        }
        // Drafts are gone.
        let left = fs::read_dir(folder.join("burn-megatron-run_201")).unwrap();
        assert_eq!(left.count(), 2);
        fs::remove_dir_all(folder).unwrap();
    }

    /// Boards of their own over one folder, as several ranks have them.
    #[test]
    fn ranks_may_post_at_the_same_time() {
        let (folder, _board) = board("ranks");
        let start = Barrier::new(8);
        thread::scope(|scope| {
            for rank in 0..8u8 {
                let (start, folder) = (&start, &folder);
                scope.spawn(move || {
                    let board = FileBulletin::open(folder, "run 1").unwrap();
                    for round in 0..50 {
                        start.wait();
                        let key = |rank: u8| format!("{round}/{rank}");
                        board.post(&key(rank), &[rank; 100]).unwrap();
                        let other = (rank + 1) % 8;
                        let value = board.read(&key(other), Duration::from_secs(60));
                        assert_eq!(value.unwrap(), [other; 100]);
                    }
                });
            }
        });
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn what_is_never_posted_is_named() {
        let (folder, board) = board("never");
        let message = board
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
        let (folder, board) = board("once");
        board.post("a", b"1").unwrap();
        let message = board.post("a", b"2").unwrap_err().to_string();
        assert!(message.contains("\"a\"") && message.contains("an id of its own"));
        assert_eq!(board.read("a", Duration::ZERO).unwrap(), b"1");
        // Other keys, though a file system may take some characters for separators.
        for key in ["a/b", "a_b", "a.b", ".a", "ä"] {
            board.post(key, key.as_bytes()).unwrap();
            assert_eq!(board.read(key, Duration::ZERO).unwrap(), key.as_bytes());
        }
        fs::remove_dir_all(folder).unwrap();
    }

    #[cfg(unix)]
    #[test]
    fn a_folder_that_is_open_to_others_is_refused() {
        use std::os::unix::fs::PermissionsExt;

        let (folder, _board) = board("open");
        let inner = folder.join("burn-megatron-run_201");
        let mode = |mode| fs::set_permissions(&inner, fs::Permissions::from_mode(mode)).unwrap();
        let made = fs::metadata(&inner).unwrap().permissions().mode();
        assert_eq!(made & 0o777, 0o700);
        mode(0o755);
        let message = FileBulletin::open(&folder, "run 1")
            .unwrap_err()
            .to_string();
        assert!(
            message.ends_with(&format!("chmod 700 {}", inner.display())),
            "{message}"
        );
        mode(0o700);
        assert!(FileBulletin::open(&folder, "run 1").is_ok());
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_named() {
        let (folder, _board) = board("refused");
        let file = folder.join("file");
        fs::write(&file, b"").unwrap();
        let message = FileBulletin::open(&file, "x").unwrap_err().to_string();
        assert!(message.contains(&file.display().to_string()), "{message}");
        fs::remove_dir_all(folder).unwrap();
    }
}
