//! Indices that are built once and kept as files.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process;
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

use super::{Array, CacheError, IntType};
use crate::data::DataError;
use crate::partial::replace_file;

/// How long another process may take, where nothing else is said.
const WAIT: Duration = Duration::from_secs(600);
/// How often it is asked.
const PAUSE: Duration = Duration::from_millis(20);

/// A folder of indices. Each set of them is known by a description of all that it follows from, whose hash is
/// the first part of its names:
///
/// - `KEY-NAME.npy`: the indices, which NumPy reads.
/// - `KEY.json`: the description, and the type, the shape and a checksum of each index. It is written last.
/// - `KEY.lock`: whoever builds them holds it. The operating system frees it when the holder is gone.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: PathBuf,
    wait: Duration,
}

/// What stands in `KEY.json`.
#[derive(Serialize, Deserialize)]
struct Manifest {
    description: Value,
    arrays: Vec<Entry>,
}

#[derive(Serialize, Deserialize)]
struct Entry {
    name: String,
    int_type: IntType,
    shape: Vec<usize>,
    xxh3: u64,
}

impl Cache {
    /// The cache in a folder, which is made where it is needed.
    pub fn new(folder: &Path) -> Self {
        Self {
            folder: folder.to_path_buf(),
            wait: WAIT,
        }
    }

    /// How long to wait for a process that builds the same.
    pub fn with_wait(self, wait: Duration) -> Self {
        Self { wait, ..self }
    }

    /// The indices of a description: those that are there, if all of them are whole, or else new ones. One
    /// process builds them; others that want the same wait.
    pub(crate) fn arrays(
        &self,
        description: &Value,
        build: impl FnOnce() -> Result<Vec<(&'static str, Array)>, DataError>,
    ) -> Result<Vec<Array>, DataError> {
        let set = Set {
            cache: self,
            description,
            key: format!("{:032x}", xxh3_128(description.to_string().as_bytes())),
        };
        if let Found::Whole(arrays) = set.open() {
            return Ok(arrays);
        }
        fs::create_dir_all(&self.folder).map_err(io_error("make", &self.folder))?;
        let lock = match set.lock()? {
            Locked::Whole(arrays) => return Ok(arrays),
            Locked::Held(lock) => lock,
        };
        let arrays = match set.open() {
            // Built by the one who held the lock before.
            Found::Whole(arrays) => arrays,
            found => {
                if let Found::Broken(reason) = found {
                    let manifest = set.path(".json");
                    tracing::warn!("{} is broken, {reason}: built again", manifest.display());
                }
                set.write(&build()?)?;
                match set.open() {
                    Found::Whole(arrays) => arrays,
                    Found::Broken(_) | Found::Nothing => {
                        let error = io::Error::other("what was written is not what is read");
                        return Err(io_error("read", &set.path(".json"))(error).into());
                    }
                }
            }
        };
        drop(lock);
        Ok(arrays)
    }
}

/// What is there of a set.
enum Found {
    Whole(Vec<Array>),
    Broken(String),
    Nothing,
}

/// How the wait for a lock ended.
enum Locked {
    Held(File),
    Whole(Vec<Array>),
}

/// The indices of one description.
struct Set<'a> {
    cache: &'a Cache,
    description: &'a Value,
    key: String,
}

impl Set<'_> {
    fn path(&self, ending: &str) -> PathBuf {
        self.cache.folder.join(format!("{}{ending}", self.key))
    }

    fn array_path(&self, name: &str) -> PathBuf {
        self.path(&format!("-{name}.npy"))
    }

    fn open(&self) -> Found {
        match self.try_open() {
            Ok(arrays) => Found::Whole(arrays),
            Err((ErrorKind::NotFound, None)) => Found::Nothing,
            Err((kind, reason)) => Found::Broken(reason.unwrap_or_else(|| kind.to_string())),
        }
    }

    /// An error with a reason is about what is there.
    fn try_open(&self) -> Result<Vec<Array>, (ErrorKind, Option<String>)> {
        let text = fs::read(self.path(".json")).map_err(|error| (error.kind(), None))?;
        let broken = |reason: String| (ErrorKind::InvalidData, Some(reason));
        let manifest: Manifest =
            serde_json::from_slice(&text).map_err(|error| broken(error.to_string()))?;
        if manifest.description != *self.description {
            return Err(broken("it describes other indices".to_string()));
        }
        let open = |entry: &Entry| {
            let path = self.array_path(&entry.name);
            let about = |what: &str| broken(format!("{} {what}", path.display()));
            let array = Array::open(&path, entry.int_type, &entry.shape);
            let array = array.map_err(|error| about(&error.to_string()))?;
            let array = array.ok_or_else(|| about("has another type or shape"))?;
            match xxh3_64(array.file()) == entry.xxh3 {
                true => Ok(array),
                false => Err(about("has another checksum")),
            }
        };
        manifest.arrays.iter().map(open).collect()
    }

    /// Waits until nobody else builds.
    fn lock(&self) -> Result<Locked, CacheError> {
        let path = self.path(".lock");
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let mut file = options.open(&path).map_err(io_error("open", &path))?;
        let started = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => {
                    let name = sign(&mut file);
                    name.map_err(io_error("write", &path))?;
                    return Ok(Locked::Held(file));
                }
                Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(error)) => return Err(io_error("lock", &path)(error)),
            }
            if let Found::Whole(arrays) = self.open() {
                return Ok(Locked::Whole(arrays));
            }
            let waited = started.elapsed();
            if waited >= self.cache.wait {
                let holder = fs::read_to_string(&path).unwrap_or_default();
                return Err(CacheError::Held {
                    lock: path,
                    holder,
                    waited,
                });
            }
            sleep(PAUSE.min(self.cache.wait - waited));
        }
    }

    /// Writes all under other names, and the manifest last: without it there is nothing.
    fn write(&self, arrays: &[(&'static str, Array)]) -> Result<(), CacheError> {
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
        let entry = |(name, array): &(&'static str, Array)| Entry {
            name: name.to_string(),
            int_type: array.int_type(),
            shape: array.shape().to_vec(),
            xxh3: xxh3_64(array.file()),
        };
        let content = Manifest {
            description: self.description.clone(),
            arrays: arrays.iter().map(entry).collect(),
        };
        let content = serde_json::to_vec_pretty(&content).map_err(io::Error::from);
        let written = content.and_then(|content| replace_file(&manifest, &content));
        written.map_err(io_error("write", &manifest))
    }
}

/// Says in the lock who holds it.
fn sign(file: &mut File) -> io::Result<()> {
    let host = gethostname::gethostname();
    let name = format!("process {} of {}", process::id(), host.to_string_lossy());
    file.set_len(0)?;
    file.write_all(name.as_bytes())
}

fn io_error(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CacheError {
    let path = path.to_path_buf();
    move |source| CacheError::Io { what, path, source }
}
