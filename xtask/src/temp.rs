//! A folder for temporary files.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{env, fs, io, process};

static COUNT: AtomicUsize = AtomicUsize::new(0);

/// A new folder in the temporary folder of the system. It is removed when dropped unless it is kept.
pub struct TempDir {
    path: PathBuf,
    keep: bool,
}

impl TempDir {
    /// Creates a folder. Its name contains the purpose.
    pub fn new(purpose: &str) -> io::Result<Self> {
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("burn-megatron-{purpose}-{}-{count}", process::id());
        let path = env::temp_dir().join(name);
        fs::create_dir(&path)?;
        Ok(Self { path, keep: false })
    }

    /// Returns the path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Keeps the folder, so that a person can examine it.
    pub fn keep(&mut self) {
        self.keep = true;
    }

    /// Writes a file, and creates its parent folders.
    #[cfg(test)]
    pub fn write(&self, name: &str, text: &str) {
        let path = self.path.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        if !self.keep {
            // A temporary folder that is left does no harm.
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}
