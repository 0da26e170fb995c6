//! Token files that take the place of others, all of them or none.

use std::ffi::OsString;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use super::{bin_path, idx_path, with_ending};
use crate::partial::{Partial, sync_folder_of};

/// The ending of an old file until the new ones are there.
const OLD: &str = ".replaced";

/// New files of a prefix on the way to their names.
///
/// The index goes first and comes last, so that nobody reads new tokens by an old one. Meanwhile the old files
/// have other names. They come back if one of the new ones cannot get its name, and of a process that was killed
/// when [`restore`] is called.
pub(super) struct Exchange {
    /// Old files that have another name.
    aside: Vec<PathBuf>,
    /// New files that have their names.
    published: Vec<PathBuf>,
}

impl Exchange {
    /// Gives the files their names, the last one last; where it fails, says of which.
    pub fn run(files: Vec<(Partial, PathBuf)>) -> Result<(), (PathBuf, io::Error)> {
        let mut exchange = Self {
            aside: vec![],
            published: vec![],
        };
        for (_, path) in files.iter().rev() {
            let aside = exchange.set_aside(path);
            aside.map_err(|error| (path.clone(), error))?;
        }
        for (partial, path) in files {
            let published = partial.publish().and_then(|()| sync_folder_of(&path));
            published.map_err(|error| (path.clone(), error))?;
            exchange.published.push(path);
        }
        exchange.published.clear();
        for path in std::mem::take(&mut exchange.aside) {
            fs::remove_file(old(&path)).map_err(|error| (old(&path), error))?;
        }
        Ok(())
    }

    /// Gives a file that is there another name.
    fn set_aside(&mut self, path: &Path) -> io::Result<()> {
        match fs::symlink_metadata(path) {
            Ok(found) if found.is_dir() => return Err(ErrorKind::IsADirectory.into()),
            Ok(_) => fs::rename(path, old(path))?,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        }
        self.aside.push(path.to_path_buf());
        sync_folder_of(path)
    }
}

impl Drop for Exchange {
    /// Nobody can be told of an error here. What then has another name comes back later.
    fn drop(&mut self) {
        for path in &self.published {
            let _ = fs::remove_file(path);
        }
        for path in self.aside.iter().rev() {
            let _ = fs::rename(old(path), path);
        }
    }
}

/// Gives the old files of a prefix their names again, where a killed process has not come to its last new one.
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
    path.push(OLD);
    path.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::indexed::{IndexedFile, IndexedWriter, TokenType};
    use crate::data::test_folder::TestFolder;

    fn writer(prefix: &Path, tokens: &[u32]) -> IndexedWriter {
        let mut writer = IndexedWriter::replace(prefix, TokenType::U16).unwrap();
        writer.document(tokens).unwrap();
        writer
    }

    fn write(prefix: &Path, tokens: &[u32], about: &str) -> Result<(), super::super::IndexedError> {
        let json = with_ending(prefix, ".json");
        let written = writer(prefix, tokens).finish_beside(&json, about.as_bytes());
        written.map(drop)
    }

    /// Checks that the files are these and no others.
    #[track_caller]
    fn assert_are(folder: &TestFolder, tokens: &[i32], about: &str) {
        let prefix = folder.path().join("t");
        let file = IndexedFile::open(&prefix).unwrap();
        assert_eq!(file.sequence(0).unwrap(), tokens);
        assert_eq!(
            fs::read(with_ending(&prefix, ".json")).unwrap(),
            about.as_bytes()
        );
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3);
    }

    #[test]
    fn old_files_go_when_all_new_ones_are_there() {
        let folder = TestFolder::new("exchange");
        let prefix = folder.path().join("t");
        write(&prefix, &[1, 2], "first").unwrap();
        write(&prefix, &[3], "second").unwrap();
        assert_are(&folder, &[3], "second");
        // One whose temporary file is gone cannot get its name.
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
        let folder = TestFolder::new("exchange-refused");
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

    /// A process that is killed after any of its renames.
    #[test]
    fn old_files_of_a_killed_process_come_back() {
        for set_aside in 0..=3 {
            let folder = TestFolder::new(&format!("exchange-killed-{set_aside}"));
            let prefix = folder.path().join("t");
            write(&prefix, &[1, 2], "first").unwrap();
            let mut exchange = Exchange {
                aside: vec![],
                published: vec![],
            };
            let paths = [
                idx_path(&prefix),
                with_ending(&prefix, ".json"),
                bin_path(&prefix),
            ];
            for path in &paths[..set_aside] {
                exchange.set_aside(path).unwrap();
            }
            // A part of the new ones may be there.
            if set_aside == 3 {
                fs::write(bin_path(&prefix), "new").unwrap();
            }
            std::mem::forget(exchange);
            let again = IndexedWriter::create(&prefix, TokenType::U16);
            assert!(matches!(again, Err(super::super::IndexedError::Exists(_))));
            assert_are(&folder, &[1, 2], "first");
            write(&prefix, &[5], "last").unwrap();
            assert_are(&folder, &[5], "last");
        }
    }
}
