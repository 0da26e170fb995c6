//! A folder that is created atomically: a temporary folder is renamed to its final name when all files are written.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use burn_megatron::atomic_file::{StagedPath, sync_folder, sync_folder_of};
use burn_megatron::checkpoint::CheckpointError;

/// A temporary folder that is renamed when it is published. It is removed on drop if it was not published.
pub(super) struct StagedFolder {
    partial: StagedPath,
    to: PathBuf,
}

impl StagedFolder {
    /// Checks that `to` does not exist.
    pub fn check_free(to: &Path) -> Result<(), CheckpointError> {
        if to.exists() {
            let there = std::io::ErrorKind::AlreadyExists.into();
            return Err(CheckpointError::io("write", to, there));
        }
        Ok(())
    }

    /// Creates a temporary folder next to `to`.
    pub fn new(to: &Path) -> Result<Self, CheckpointError> {
        if to.file_name().is_none() {
            return Err(CheckpointError::corrupt(to, "it has no folder name"));
        }
        if let Some(parent) = parent(to) {
            let made = fs::create_dir_all(parent);
            made.map_err(|error| CheckpointError::io("create", parent, error))?;
        }
        let partial = StagedPath::folder(to);
        Ok(Self {
            partial: partial.map_err(|error| CheckpointError::io("create", to, error))?,
            to: to.to_path_buf(),
        })
    }

    /// Writes and syncs a small file.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<(), CheckpointError> {
        let (mut file, path) = self.create(name)?;
        let written = file.write_all(bytes).and_then(|()| file.sync_all());
        written.map_err(|error| CheckpointError::io("write", path, error))
    }

    /// Creates a file. The caller must write the file and [sync](File::sync_all) it.
    pub fn create(&self, name: &str) -> Result<(File, PathBuf), CheckpointError> {
        let path = self.partial.path().join(name);
        match File::create_new(&path) {
            Ok(file) => Ok((file, path)),
            Err(error) => Err(CheckpointError::io("create", path, error)),
        }
    }

    /// Syncs the folder and renames it to its destination.
    pub fn publish(self) -> Result<(), CheckpointError> {
        let synced = sync_folder(self.partial.path());
        let published = synced
            .and_then(|()| self.partial.publish())
            .and_then(|()| sync_folder_of(&self.to));
        published.map_err(|error| CheckpointError::io("write", &self.to, error))
    }
}

fn parent(path: &Path) -> Option<&Path> {
    path.parent()
        .filter(|parent| !parent.as_os_str().is_empty())
}
