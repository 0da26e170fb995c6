//! A temporary folder for a test.

use std::fs;
use std::path::{Path, PathBuf};
use std::process;

/// A new, empty folder in the system's temporary folder; removed on drop.
pub(crate) struct TestFolder(PathBuf);

impl TestFolder {
    /// `test` must be unique among the crate's tests, which run concurrently.
    pub(crate) fn new(test: &str) -> Self {
        let path = std::env::temp_dir().join(format!("burn-megatron-{}-{test}", process::id()));
        fs::create_dir_all(&path).expect("the temporary folder is writable");
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Writes a file, and creates its folders.
    pub(crate) fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        let path = self.0.join(name);
        fs::create_dir_all(path.parent().expect("a file has a parent")).expect("writable");
        fs::write(path, content).expect("writable");
    }
}

impl Drop for TestFolder {
    fn drop(&mut self) {
        // A leftover folder does no harm, and a panic here would hide the test's own.
        let _ = fs::remove_dir_all(&self.0);
    }
}
