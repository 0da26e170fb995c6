//! A cache of sample indices on disk.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process;
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

use super::{CacheError, NpyArray, NpyType};
use crate::DataError;
use burn_megatron::atomic_file::replace_file;
use burn_megatron::regular_file;

/// The default time to wait for another process.
const DEFAULT_WAIT: Duration = Duration::from_secs(600);
/// The pause between two polls.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// The maximum size of a manifest that is read, in bytes.
const MAX_MANIFEST_BYTES: u64 = 16 << 20;
/// The maximum size of a lock file that is read, in bytes.
const MAX_HOLDER_BYTES: u64 = 1 << 10;

/// A folder that caches the sample indices of data sets. Each set of indices is identified by a description of all
/// inputs from which the indices are built. `KEY` is the hash of this description. The files of a set of indices are:
///
/// - `KEY-NAME.npy`: one index, as a NumPy array.
/// - `KEY.json`: the description, and the type, shape and checksum of each index. This file is written last.
/// - `KEY.lock`: a file that is locked while the indices are built. The lock is released when the process ends.
#[derive(Clone, Debug)]
pub struct IndexCache {
    folder: PathBuf,
    wait: Duration,
}

/// The content of `KEY.json`.
#[derive(Serialize, Deserialize)]
struct CacheManifest {
    description: Value,
    arrays: Vec<ArrayEntry>,
}

#[derive(Serialize, Deserialize)]
struct ArrayEntry {
    name: String,
    int_type: NpyType,
    shape: Vec<usize>,
    xxh3: u64,
}

impl IndexCache {
    /// Creates a cache in this folder. The folder is created when it is needed.
    pub fn new(folder: &Path) -> Self {
        Self {
            folder: folder.to_path_buf(),
            wait: DEFAULT_WAIT,
        }
    }

    /// Sets the maximum time to wait for another process that builds the same indices.
    pub fn with_wait(self, wait: Duration) -> Self {
        Self { wait, ..self }
    }

    /// Returns the indices of a description: from the cache if they are valid, otherwise newly built. One process
    /// builds them, and other processes wait.
    pub(crate) fn arrays(
        &self,
        description: &Value,
        build: impl FnOnce() -> Result<Vec<(&'static str, NpyArray)>, DataError>,
    ) -> Result<Vec<NpyArray>, DataError> {
        let set = CacheEntry {
            cache: self,
            description,
            key: format!("{:032x}", xxh3_128(description.to_string().as_bytes())),
        };
        if let CacheLookup::Valid(arrays) = set.open() {
            return Ok(arrays);
        }
        fs::create_dir_all(&self.folder).map_err(io_error("make", &self.folder))?;
        let lock = match set.lock()? {
            LockOutcome::BuiltMeanwhile(arrays) => return Ok(arrays),
            LockOutcome::Held(lock) => lock,
        };
        let arrays = match set.open() {
            // Another process has built them while this process waited for the lock.
            CacheLookup::Valid(arrays) => arrays,
            found => {
                if let CacheLookup::Corrupt(reason) = found {
                    let manifest = set.path(".json");
                    tracing::warn!(
                        "{} is invalid ({reason}): rebuilding it",
                        manifest.display()
                    );
                }
                set.write(&build()?)?;
                match set.open() {
                    CacheLookup::Valid(arrays) => arrays,
                    CacheLookup::Corrupt(_) | CacheLookup::Missing => {
                        let error = io::Error::other(
                            "the indices differ from the indices that were written",
                        );
                        return Err(io_error("read", &set.path(".json"))(error).into());
                    }
                }
            }
        };
        drop(lock);
        Ok(arrays)
    }
}

/// The result of looking up indices.
enum CacheLookup {
    Valid(Vec<NpyArray>),
    Corrupt(String),
    Missing,
}

/// The result of waiting for the lock.
enum LockOutcome {
    Held(File),
    BuiltMeanwhile(Vec<NpyArray>),
}

/// The cached indices of one description.
struct CacheEntry<'a> {
    cache: &'a IndexCache,
    description: &'a Value,
    key: String,
}

impl CacheEntry<'_> {
    fn path(&self, ending: &str) -> PathBuf {
        self.cache.folder.join(format!("{}{ending}", self.key))
    }

    fn array_path(&self, name: &str) -> PathBuf {
        self.path(&format!("-{name}.npy"))
    }

    fn open(&self) -> CacheLookup {
        match self.try_open() {
            Ok(arrays) => CacheLookup::Valid(arrays),
            Err((ErrorKind::NotFound, None)) => CacheLookup::Missing,
            Err((kind, reason)) => CacheLookup::Corrupt(reason.unwrap_or_else(|| kind.to_string())),
        }
    }

    /// Opens the cached indices. An error with a reason is an error of the content of the cache.
    fn try_open(&self) -> Result<Vec<NpyArray>, (ErrorKind, Option<String>)> {
        let text = regular_file::read(&self.path(".json"), MAX_MANIFEST_BYTES)
            .map_err(|error| (error.kind(), None))?;
        let corrupt = |reason: String| (ErrorKind::InvalidData, Some(reason));
        let manifest: CacheManifest =
            serde_json::from_slice(&text).map_err(|error| corrupt(error.to_string()))?;
        if manifest.description != *self.description {
            return Err(corrupt("it describes other indices".to_string()));
        }
        let open = |entry: &ArrayEntry| {
            let path = self.array_path(&entry.name);
            let invalid = |what: &str| corrupt(format!("{} {what}", path.display()));
            let array = NpyArray::open(&path, entry.int_type, &entry.shape)
                .map_err(|error| invalid(&error.to_string()))?
                .ok_or_else(|| invalid("has another type or shape"))?;
            if xxh3_64(array.file()) == entry.xxh3 {
                Ok(array)
            } else {
                Err(invalid("has another checksum"))
            }
        };
        manifest.arrays.iter().map(open).collect()
    }

    /// Locks the entry, or waits until another process has built it.
    fn lock(&self) -> Result<LockOutcome, CacheError> {
        let path = self.path(".lock");
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let mut file = options.open(&path).map_err(io_error("open", &path))?;
        let started = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => {
                    let name = write_holder(&mut file);
                    name.map_err(io_error("write", &path))?;
                    return Ok(LockOutcome::Held(file));
                }
                Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(error)) => return Err(io_error("lock", &path)(error)),
            }
            if let CacheLookup::Valid(arrays) = self.open() {
                return Ok(LockOutcome::BuiltMeanwhile(arrays));
            }
            let waited = started.elapsed();
            if waited >= self.cache.wait {
                let holder = regular_file::read_text(&path, MAX_HOLDER_BYTES).unwrap_or_default();
                return Err(CacheError::LockTimeout {
                    lock: path,
                    holder,
                    waited,
                });
            }
            sleep(POLL_INTERVAL.min(self.cache.wait - waited));
        }
    }

    /// Replaces each file atomically. The manifest is written last: without it, the entry does not exist.
    fn write(&self, arrays: &[(&'static str, NpyArray)]) -> Result<(), CacheError> {
        let manifest = self.path(".json");
        match fs::remove_file(&manifest) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(io_error("remove", &manifest)(error));
            }
            _ => {}
        }
        for (name, array) in arrays {
            let path = self.array_path(name);
            replace_file(&path, array.file()).map_err(io_error("write", &path))?;
        }
        let entry = |(name, array): &(&'static str, NpyArray)| ArrayEntry {
            name: name.to_string(),
            int_type: array.int_type(),
            shape: array.shape().to_vec(),
            xxh3: xxh3_64(array.file()),
        };
        let content = CacheManifest {
            description: self.description.clone(),
            arrays: arrays.iter().map(entry).collect(),
        };
        let content = serde_json::to_vec_pretty(&content).map_err(io::Error::from);
        let written = content.and_then(|content| replace_file(&manifest, &content));
        written.map_err(io_error("write", &manifest))
    }
}

/// Writes this process and host into the lock file.
fn write_holder(file: &mut File) -> io::Result<()> {
    let host = gethostname::gethostname();
    let name = format!("process {} of {}", process::id(), host.to_string_lossy());
    file.set_len(0)?;
    file.write_all(name.as_bytes())
}

fn io_error(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CacheError {
    let path = path.to_path_buf();
    move |source| CacheError::Io { what, path, source }
}
