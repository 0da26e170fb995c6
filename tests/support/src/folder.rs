//! A temporary folder for a test.

use std::fs;
use std::path::Path;

use tempfile::TempDir;

/// A new, empty folder in the system's temporary folder. It is removed when it is dropped.
pub struct TestFolder(TempDir);

impl TestFolder {
    /// Creates the folder.
    ///
    /// # Panics
    ///
    /// Panics if the temporary folder of the system is not writable.
    #[expect(clippy::new_without_default, reason = "it makes a folder")]
    pub fn new() -> Self {
        Self(tempfile::tempdir().expect("the temporary folder is writable"))
    }

    /// Returns the path of the folder.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Writes a file, and creates its parent folders.
    ///
    /// # Panics
    ///
    /// Panics if the file cannot be written.
    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        let path = self.0.path().join(name);
        fs::create_dir_all(path.parent().expect("a file has a parent")).expect("writable");
        fs::write(path, content).expect("writable");
    }
}
