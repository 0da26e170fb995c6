//! Replaces a set of token files: either all files are replaced or none.

use std::ffi::OsString;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use super::{bin_path, idx_path, with_ending};
use burn_megatron::atomic_file::{StagedPath, sync_folder_of};

/// The suffix of an old file until the replacement is complete.
const REPLACED_SUFFIX: &str = ".replaced";

/// A replacement of the files of a prefix, in progress.
///
/// The index is moved away first and published last, so that no reader pairs new tokens with an old index. Meanwhile
/// the old files have temporary names. They are restored if a new file cannot be published. After a process was killed,
/// [`restore`] restores them.
pub(super) struct FileReplacement {
    /// The old files that were moved away.
    moved: Vec<PathBuf>,
    /// The new files that were published.
    published: Vec<PathBuf>,
}

impl FileReplacement {
    /// Publishes the files in order. On failure returns the path that failed.
    pub fn run(files: Vec<(StagedPath, PathBuf)>) -> Result<(), (PathBuf, io::Error)> {
        let mut replacement = Self {
            moved: vec![],
            published: vec![],
        };
        for (_, path) in files.iter().rev() {
            let moved = replacement.move_aside(path);
            moved.map_err(|error| (path.clone(), error))?;
        }
        for (partial, path) in files {
            let published = partial.publish().and_then(|()| sync_folder_of(&path));
            published.map_err(|error| (path.clone(), error))?;
            replacement.published.push(path);
        }
        replacement.published.clear();
        for path in std::mem::take(&mut replacement.moved) {
            fs::remove_file(old(&path)).map_err(|error| (old(&path), error))?;
        }
        Ok(())
    }

    /// Renames an existing file.
    fn move_aside(&mut self, path: &Path) -> io::Result<()> {
        match fs::symlink_metadata(path) {
            Ok(found) if found.is_dir() => return Err(ErrorKind::IsADirectory.into()),
            Ok(_) => fs::rename(path, old(path))?,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        }
        self.moved.push(path.to_path_buf());
        sync_folder_of(path)
    }
}

impl Drop for FileReplacement {
    /// Restores the old files. Errors are ignored, because [`restore`] tries again later.
    fn drop(&mut self) {
        for path in &self.published {
            let _ = fs::remove_file(path);
        }
        for path in self.moved.iter().rev() {
            let _ = fs::rename(old(path), path);
        }
    }
}

/// Restores the old files of a prefix if a process was killed before it published the index.
pub(super) fn restore(prefix: &Path) -> io::Result<()> {
    let idx = idx_path(prefix);
    if idx.symlink_metadata().is_ok() {
        return Ok(());
    }
    for path in [bin_path(prefix), with_ending(prefix, ".json"), idx] {
        match fs::rename(old(&path), &path) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

fn old(path: &Path) -> PathBuf {
    let mut path = OsString::from(path);
    path.push(REPLACED_SUFFIX);
    path.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::indexed::{IndexedDataset, IndexedDatasetBuilder, TokenType};
    use burn_megatron_test_support::TestFolder;

    fn writer(prefix: &Path, tokens: &[u32]) -> IndexedDatasetBuilder {
        let mut writer = IndexedDatasetBuilder::replace(prefix, TokenType::U16).unwrap();
        writer.document(tokens).unwrap();
        writer
    }

    fn write(
        prefix: &Path,
        tokens: &[u32],
        sidecar: &str,
    ) -> Result<(), super::super::IndexedDatasetError> {
        let json = with_ending(prefix, ".json");
        let written = writer(prefix, tokens).finish_beside(&json, sidecar.as_bytes());
        written.map(drop)
    }

    /// Checks that exactly these files exist.
    #[track_caller]
    fn assert_are(folder: &TestFolder, tokens: &[i32], sidecar: &str) {
        let prefix = folder.path().join("t");
        let file = IndexedDataset::open(&prefix).unwrap();
        assert_eq!(file.sequence(0).unwrap(), tokens);
        assert_eq!(
            fs::read(with_ending(&prefix, ".json")).unwrap(),
            sidecar.as_bytes()
        );
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3);
    }

    #[test]
    fn old_files_go_when_all_new_ones_are_there() {
        let folder = TestFolder::new();
        let prefix = folder.path().join("t");
        write(&prefix, &[1, 2], "first").unwrap();
        write(&prefix, &[3], "second").unwrap();
        assert_are(&folder, &[3], "second");
        // The staged file is gone, so it cannot be published.
        let writer = writer(&prefix, &[4]);
        for entry in fs::read_dir(folder.path()).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|ending| ending == "partial") {
                fs::remove_file(path).unwrap();
            }
        }
        let error = writer.finish_beside(&with_ending(&prefix, ".json"), b"third");
        let text = error.unwrap_err().to_string();
        assert!(text.contains("t.bin"), "{text}");
        assert_are(&folder, &[3], "second");
    }

    #[test]
    fn what_cannot_be_replaced_loses_nothing() {
        let folder = TestFolder::new();
        let prefix = folder.path().join("t");
        write(&prefix, &[1, 2], "first").unwrap();
        let json = with_ending(&prefix, ".json");
        fs::remove_file(&json).unwrap();
        fs::create_dir(&json).unwrap();
        let text = write(&prefix, &[3], "second").unwrap_err().to_string();
        assert!(text.contains("t.json"), "{text}");
        fs::remove_dir(&json).unwrap();
        fs::write(&json, "first").unwrap();
        assert_are(&folder, &[1, 2], "first");
    }

    /// Simulates a process that is killed after any of its renames.
    #[test]
    fn old_files_of_a_killed_process_come_back() {
        for moved in 0..=3 {
            let folder = TestFolder::new();
            let prefix = folder.path().join("t");
            write(&prefix, &[1, 2], "first").unwrap();
            let mut replacement = FileReplacement {
                moved: vec![],
                published: vec![],
            };
            let paths = [
                idx_path(&prefix),
                with_ending(&prefix, ".json"),
                bin_path(&prefix),
            ];
            for path in &paths[..moved] {
                replacement.move_aside(path).unwrap();
            }
            // Some of the new files may have been published.
            if moved == 3 {
                fs::write(bin_path(&prefix), "new").unwrap();
            }
            std::mem::forget(replacement);
            let again = IndexedDatasetBuilder::create(&prefix, TokenType::U16);
            assert!(matches!(
                again,
                Err(super::super::IndexedDatasetError::Exists(_))
            ));
            assert_are(&folder, &[1, 2], "first");
            write(&prefix, &[5], "last").unwrap();
            assert_are(&folder, &[5], "last");
        }
    }
}
