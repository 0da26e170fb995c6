//! A folder that is whole or not there.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use burn_megatron::checkpoint::CheckpointError;

/// A folder in the making; removed unless it is published.
pub(super) struct Draft {
    path: PathBuf,
    to: PathBuf,
    published: bool,
}

impl Draft {
    /// A folder beside `to`, of which nothing is known yet.
    pub fn new(to: &Path) -> Result<Self, CheckpointError> {
        let Some(name) = to.file_name().and_then(|name| name.to_str()) else {
            return Err(CheckpointError::corrupt(to, "it names no folder"));
        };
        let path = to.with_file_name(format!(".{name}.partial-{}", std::process::id()));
        if let Some(parent) = parent(to) {
            let made = fs::create_dir_all(parent);
            made.map_err(|error| CheckpointError::io("create", parent, error))?;
        }
        fs::create_dir(&path).map_err(|error| CheckpointError::io("create", &path, error))?;
        Ok(Self {
            path,
            to: to.to_path_buf(),
            published: false,
        })
    }

    /// A small file, whole.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<(), CheckpointError> {
        let (mut file, path) = self.create(name)?;
        let written = file.write_all(bytes).and_then(|()| file.sync_all());
        written.map_err(|error| CheckpointError::io("write", path, error))
    }

    /// A new file, to be filled and [synchronised](File::sync_all).
    pub fn create(&self, name: &str) -> Result<(File, PathBuf), CheckpointError> {
        let path = self.path.join(name);
        match File::create_new(&path) {
            Ok(file) => Ok((file, path)),
            Err(error) => Err(CheckpointError::io("create", path, error)),
        }
    }

    /// Gives the folder its name, when all is on the disk.
    pub fn publish(mut self) -> Result<(), CheckpointError> {
        sync_folder(&self.path)?;
        let renamed = fs::rename(&self.path, &self.to);
        renamed.map_err(|error| CheckpointError::io("write", &self.to, error))?;
        self.published = true;
        sync_folder(parent(&self.to).unwrap_or(Path::new(".")))
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.published {
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

fn parent(path: &Path) -> Option<&Path> {
    path.parent()
        .filter(|parent| !parent.as_os_str().is_empty())
}

fn sync_folder(path: &Path) -> Result<(), CheckpointError> {
    // Elsewhere a folder cannot be opened, and needs not be.
    match cfg!(unix) {
        true => File::open(path)
            .and_then(|folder| folder.sync_all())
            .map_err(|error| CheckpointError::io("sync", path, error)),
        false => Ok(()),
    }
}
