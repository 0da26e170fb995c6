//! Checks the output path of a command before the command writes to it.

use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

use super::CheckpointError;
use super::folder::{CheckpointName, LATEST, LOCK, try_lock};
use super::manifest::MANIFEST;
use crate::regular_file;

/// Checks that writing to the file or folder `to` does not overwrite an input, a checkpoint or the folder of a run that
/// is in progress. `read` lists the inputs. Links and `..` are resolved.
///
/// # Errors
///
/// [`CheckpointError::Output`] if `to` is a path in `read`, contains such a path or is inside such a path. The same
/// error is returned if `to` is in a checkpoint or a folder of checkpoints. [`CheckpointError::Locked`] if `to` is in
/// the folder of a run that is in progress.
pub fn check_output(to: &Path, read: &[&Path]) -> Result<(), CheckpointError> {
    let resolved = check_place(to)?;
    for read in read {
        let other = resolve(read)?;
        let relation = if resolved == other {
            "it is"
        } else if resolved.starts_with(&other) {
            "it is inside"
        } else if other.starts_with(&resolved) {
            "it contains"
        } else {
            continue;
        };
        let what = format!("{relation} {}, which is read", read.display());
        return Err(refused(to, what));
    }
    for folder in resolved.ancestors() {
        check_not_running(folder)?;
        check_not_running(&folder.join("checkpoints"))?;
    }
    Ok(())
}

/// Checks that a file or folder is not inside a checkpoint or a folder of checkpoints. A file there could be removed
/// together with a checkpoint, and a folder could be mistaken for a checkpoint. Returns the path without links and
/// `..`.
///
/// # Errors
///
/// The errors of [`check_output`].
pub fn check_place(to: &Path) -> Result<PathBuf, CheckpointError> {
    let resolved = resolve(to)?;
    if is_checkpoint(&resolved) {
        return Err(refused(to, "it is a checkpoint".into()));
    }
    for folder in resolved.ancestors().skip(1) {
        let what = if is_checkpoint(folder) {
            "the checkpoint"
        } else if is_folder_of_checkpoints(folder) {
            "the folder of checkpoints"
        } else {
            continue;
        };
        let what = format!("it is inside {what} {}", folder.display());
        return Err(refused(to, what));
    }
    Ok(resolved)
}

fn refused(path: &Path, what: String) -> CheckpointError {
    CheckpointError::Output {
        path: path.to_path_buf(),
        what,
    }
}

/// Returns a path without links and `..`. The last parts of the path may not exist.
fn resolve(path: &Path) -> Result<PathBuf, CheckpointError> {
    let failed = |error| CheckpointError::io("resolve", path, error);
    let absolute = std::path::absolute(path).map_err(failed)?;
    let mut there = absolute.as_path();
    let mut resolved = loop {
        match (there.canonicalize(), there.parent()) {
            (Ok(found), _) => break found,
            (Err(_), Some(parent)) => there = parent,
            (Err(error), None) => return Err(failed(error)),
        }
    };
    let rest = absolute.strip_prefix(there).unwrap_or(&absolute);
    for part in rest.components() {
        match part {
            Component::ParentDir => drop(resolved.pop()),
            part => resolved.push(part),
        }
    }
    Ok(resolved)
}

/// Whether a folder is a checkpoint. Other programs also write manifests of this name.
fn is_checkpoint(folder: &Path) -> bool {
    let is_part = |entry: io::Result<fs::DirEntry>| {
        entry.is_ok_and(|entry| entry.file_name().as_encoded_bytes().starts_with(b"part-"))
    };
    folder.join(MANIFEST).is_file()
        && fs::read_dir(folder).is_ok_and(|mut entries| entries.any(is_part))
}

/// Whether checkpoints are saved to a folder.
fn is_folder_of_checkpoints(folder: &Path) -> bool {
    let is_step = |entry: io::Result<fs::DirEntry>| {
        let name = entry.map(|entry| entry.file_name());
        name.is_ok_and(|name| name.to_str().and_then(CheckpointName::parse).is_some())
    };
    let is_used = folder.join(LOCK).is_file() || folder.join(LATEST).is_file();
    is_used
        && (folder.ends_with("checkpoints")
            || fs::read_dir(folder).is_ok_and(|mut entries| entries.any(is_step)))
}

/// Checks that no run saves to a folder of checkpoints. It does not write anything.
fn check_not_running(folder: &Path) -> Result<(), CheckpointError> {
    if !is_folder_of_checkpoints(folder) {
        return Ok(());
    }
    let lock = folder.join(LOCK);
    let file = match regular_file::open(&lock) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(CheckpointError::io("open", lock, error)),
    };
    try_lock(&file, folder)
}
