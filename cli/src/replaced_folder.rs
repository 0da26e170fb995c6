//! Writes a folder that replaces an existing folder.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use burn_megatron::regular_file::is_there;

use crate::error::Error;

/// Calls `write` with the path of a new folder, which then replaces `to`. An existing folder is kept until the new
/// folder is complete.
///
/// # Errors
/// Returns the errors of `write`, and an error if a rename fails.
pub fn replace<T>(to: &Path, write: impl FnOnce(&Path) -> Result<T, Error>) -> Result<T, Error> {
    let again = written_path(to);
    if again == to {
        return write(to);
    }
    let former = sibling(to, "former");
    for left in [&again, &former] {
        if left.exists() {
            fs::remove_dir_all(left)?;
        }
    }
    let written = write(&again)?;
    fs::rename(to, &former)?;
    fs::rename(again, to)?;
    fs::remove_dir_all(former)?;
    Ok(written)
}

/// Returns the path that [`replace`] writes to: `to` itself, or a hidden folder next to an existing folder.
pub fn written_path(to: &Path) -> PathBuf {
    if is_there(to) {
        sibling(to, "again")
    } else {
        to.to_path_buf()
    }
}

/// Returns the path of a hidden folder next to the given folder.
fn sibling(path: &Path, what: &str) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(format!(".{what}"));
    path.with_file_name(name)
}
