//! A file of a checkpoint that is read where it lies.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use memmap2::Mmap;

use super::{CheckpointError, disk};

/// A file whose size is known, mapped when it is first read.
#[derive(Debug)]
pub struct DataFile {
    path: PathBuf,
    size: u64,
    mapped: OnceLock<(File, Mmap)>,
}

impl DataFile {
    /// Checks the size, and no more.
    pub fn open(path: PathBuf, size: u64) -> Result<Self, CheckpointError> {
        let found = disk::check_is_file(&path)?;
        let file = Self {
            path,
            size,
            mapped: OnceLock::new(),
        };
        file.check_size(found)?;
        Ok(file)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    fn check_size(&self, found: u64) -> Result<(), CheckpointError> {
        match found == self.size {
            true => Ok(()),
            false => Err(CheckpointError::corrupt(
                &self.path,
                format!("it has {found} bytes, and was written with {}", self.size),
            )),
        }
    }

    /// Reads the bytes of a range that lies in the size of the file, without the map: what the disk cannot
    /// give is an error, where a mapped page that cannot be read ends the process.
    pub fn read(&self, range: Range<u64>) -> Result<Vec<u8>, CheckpointError> {
        let failed = |error: io::Error| CheckpointError::io("read", &self.path, error);
        let mut file = disk::open_to_read(&self.path)?;
        self.check_size(file.metadata().map_err(failed)?.len())?;
        file.seek(SeekFrom::Start(range.start)).map_err(failed)?;
        let mut bytes = vec![0; (range.end - range.start) as usize];
        file.read_exact(&mut bytes).map_err(failed)?;
        Ok(bytes)
    }

    /// The bytes of a range that lies in the size of the file. It may not shrink while they are used.
    pub fn bytes(&self, range: Range<u64>) -> Result<&[u8], CheckpointError> {
        let failed = |error: io::Error| CheckpointError::io("read", &self.path, error);
        if self.mapped.get().is_none() {
            let file = disk::open_to_read(&self.path)?;
            // Before it is mapped: a page behind the end of a file ends the process.
            self.check_size(file.metadata().map_err(failed)?.len())?;
            // Safety: published files are never written again, and the size was checked.
            let map = unsafe { Mmap::map(&file) }.map_err(failed)?;
            // Another thread may have been first.
            let _ = self.mapped.set((file, map));
        }
        let Some((file, map)) = self.mapped.get() else {
            unreachable!("it was mapped above")
        };
        self.check_size(file.metadata().map_err(failed)?.len())?;
        let known = || format!("it has {} bytes, and {range:?} are wanted", map.len());
        map.get(range.start as usize..range.end as usize)
            .ok_or_else(|| CheckpointError::corrupt(&self.path, known()))
    }
}
