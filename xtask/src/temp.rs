//! A folder for temporary files.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{env, fs, io, process};

static COUNT: AtomicUsize = AtomicUsize::new(0);

/// A fresh folder among the system's temporary files, removed when dropped unless kept.
pub struct TempDir {
    path: PathBuf,
    keep: bool,
}

impl TempDir {
    /// Makes a folder whose name says what it is for.
    pub fn new(purpose: &str) -> io::Result<Self> {
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("burn-megatron-{purpose}-{}-{count}", process::id());
        let path = env::temp_dir().join(name);
        fs::create_dir(&path)?;
        Ok(Self { path, keep: false })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Leaves the folder in place, for a person to look into.
    pub fn keep(&mut self) {
        self.keep = true;
    }

    /// Writes a file, making the folders on its way.
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
            // A leftover among temporary files harms nobody.
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}
