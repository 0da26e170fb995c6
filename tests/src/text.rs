//! Text that is easy to learn.

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn_megatron_data::TextData;

/// A folder with twelve files of text that is easy to learn. The folder is removed when it is dropped.
pub struct Text(PathBuf);

impl Text {
    /// Writes the files into a new folder.
    ///
    /// # Panics
    ///
    /// Panics if the folder for temporary files is not writable.
    #[expect(clippy::new_without_default, reason = "it writes files")]
    pub fn new() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("burn-megatron-training-{}-{number}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        fs::create_dir_all(&folder).unwrap();
        for file in 0..12 {
            let text = format!("fn number_{file}() -> usize {{ {file} }}\n").repeat(20);
            fs::write(folder.join(format!("{file}.rs")), text).unwrap();
        }
        Self(folder)
    }

    /// Reads the files.
    ///
    /// # Panics
    ///
    /// Panics if the files cannot be read.
    pub fn open(&self) -> TextData {
        TextData::open(&self.0).unwrap()
    }
}

impl Drop for Text {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
