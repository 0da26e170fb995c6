//! A data file of a checkpoint, mapped into memory.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use memmap2::Mmap;

use super::{CheckpointError, disk};

/// A file of known size, which is mapped into memory when it is first read.
#[derive(Debug)]
pub struct MappedFile {
    path: PathBuf,
    size: u64,
    mapped: OnceLock<(File, Mmap)>,
}

impl MappedFile {
    /// Opens the file and checks its size. The file is not mapped yet.
    pub fn open(path: PathBuf, size: u64) -> Result<Self, CheckpointError> {
        let found = disk::check_is_file(&path)?;
        let file = Self {
            path,
            size,
            mapped: OnceLock::new(),
        };
        if found != size {
            // If the file is a Git LFS pointer, the error says so.
            disk::open_to_read(&file.path)?;
        }
        file.check_size(found)?;
        Ok(file)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    fn check_size(&self, found: u64) -> Result<(), CheckpointError> {
        if found == self.size {
            return Ok(());
        }
        let what = format!("the file has {found} bytes, expected {}", self.size);
        Err(CheckpointError::corrupt(&self.path, what))
    }

    /// Checks the current size of the open file.
    fn check_open(&self, file: &File) -> Result<(), CheckpointError> {
        let metadata = file.metadata().map_err(|error| self.failed(error))?;
        self.check_size(metadata.len())
    }

    fn failed(&self, error: io::Error) -> CheckpointError {
        CheckpointError::io("read", &self.path, error)
    }

    /// Reads a range of the file without the memory mapping. A failed read is returned as an error. With the mapping, a
    /// page that cannot be read would kill the process.
    pub fn read(&self, range: Range<u64>) -> Result<Vec<u8>, CheckpointError> {
        let failed = |error| self.failed(error);
        let mut file = disk::open_to_read(&self.path)?;
        self.check_open(&file)?;
        file.seek(SeekFrom::Start(range.start)).map_err(failed)?;
        let mut bytes = vec![0; (range.end - range.start) as usize];
        file.read_exact(&mut bytes).map_err(failed)?;
        Ok(bytes)
    }

    /// Returns the bytes of a range of the file. The file must not shrink while they are used.
    pub fn bytes(&self, range: Range<u64>) -> Result<&[u8], CheckpointError> {
        let failed = |error| self.failed(error);
        if self.mapped.get().is_none() {
            let file = disk::open_to_read(&self.path)?;
            // The size is checked before mapping, because access to a page beyond the end of the file kills the
            // process.
            self.check_open(&file)?;
            // Safety: published files are never written again, and the size has been checked.
            let map = unsafe { Mmap::map(&file) }.map_err(failed)?;
            // Another thread may have mapped the file in the meantime.
            let _ = self.mapped.set((file, map));
        }
        let Some((file, map)) = self.mapped.get() else {
            unreachable!("it was mapped above")
        };
        self.check_open(file)?;
        let known = || format!("it has {} bytes, and {range:?} was requested", map.len());
        map.get(range.start as usize..range.end as usize)
            .ok_or_else(|| CheckpointError::corrupt(&self.path, known()))
    }
}
