//! Finds and reads the files of a folder in an order that does not depend on the file system.

use std::fs;
use std::path::{Path, PathBuf};

use super::{DataError, TextDocuments};
use burn_megatron::regular_file;

/// Folders of generated files.
const SKIPPED_FOLDERS: [&str; 3] = ["target", "node_modules", "runs"];

/// Returns all files below `root` with one of `extensions`, in the order of their relative paths. The relative paths
/// are the document keys. Returns `None` if there are no such files.
pub(super) fn read_folder(
    root: &Path,
    extensions: &[&str],
) -> Result<Option<TextDocuments>, DataError> {
    let files = find_files(root, |path| has_extension(path, extensions))?;
    let mut documents = TextDocuments::default();
    for (key, path) in &files {
        documents.push(key, &read_file(path)?);
    }
    Ok((!files.is_empty()).then_some(documents))
}

/// Returns the files in a folder and its subfolders for which `wanted` returns true, in the order of their relative
/// paths. The same subfolders are searched as in [`TextData::open`](super::TextData::open).
///
/// # Errors
///
/// [`DataError::Unreadable`] if a folder cannot be read.
pub fn list_folder(root: &Path, wanted: impl Fn(&Path) -> bool) -> Result<Vec<PathBuf>, DataError> {
    let files = find_files(root, wanted)?;
    Ok(files.into_iter().map(|(_, path)| path).collect())
}

/// Returns the files below `root` for which `wanted` is true, with their relative paths. Relative paths are joined with
/// `/` on every system, and the files are sorted by them.
///
/// Symbolic links are not followed, so the search is finite and stays within `root`.
fn find_files(
    root: &Path,
    wanted: impl Fn(&Path) -> bool,
) -> Result<Vec<(Vec<u8>, PathBuf)>, DataError> {
    let mut files = Vec::new();
    // A stack instead of recursion, because folders may be deeply nested.
    let mut open = vec![(root.to_path_buf(), Vec::new())];
    while let Some((folder, prefix)) = open.pop() {
        let unreadable = |source| DataError::Unreadable {
            path: folder.clone(),
            source,
        };
        for entry in fs::read_dir(&folder).map_err(unreadable)? {
            let entry = entry.map_err(unreadable)?;
            let (path, name) = (entry.path(), entry.file_name());
            if name.as_encoded_bytes().starts_with(b".") {
                continue;
            }
            let mut key = prefix.clone();
            key.extend_from_slice(name.as_encoded_bytes());
            // The type of the directory entry: a symbolic link is neither a file nor a folder.
            let kind = entry.file_type().map_err(|source| DataError::Unreadable {
                path: path.clone(),
                source,
            })?;
            if kind.is_dir() && !SKIPPED_FOLDERS.iter().any(|skipped| name == *skipped) {
                key.push(b'/');
                open.push((path, key));
            } else if kind.is_file() && wanted(&path) {
                files.push((key, path));
            }
        }
    }
    files.sort();
    Ok(files)
}

/// Returns the content of one file.
pub(super) fn read_file(path: &Path) -> Result<Vec<u8>, DataError> {
    // The complete text is held in memory, so its size has no other limit.
    regular_file::read(path, u64::MAX).map_err(|source| DataError::Unreadable {
        path: path.to_path_buf(),
        source,
    })
}

fn has_extension(path: &Path, extensions: &[&str]) -> bool {
    path.extension().is_some_and(|found| {
        extensions
            .iter()
            .any(|wanted| found.eq_ignore_ascii_case(wanted))
    })
}
