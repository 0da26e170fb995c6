//! The file of a part while it is written.

use std::io::{self, BufWriter, Write};
use std::path::Path;

use super::checksum::{CHUNK, Summing};
use super::disk::{Disk, DiskFile};
use super::{CheckpointError, Checksum};

/// Small stretches are written together, this many bytes at once.
const BUFFER: usize = 1 << 20;

/// Larger stretches are written and summed up in steps of so many bytes: the second finds in the cache of
/// the core what the first has brought there.
const STEP: usize = 1 << 18;

/// The file of a part while it is written.
pub(super) struct PartFile<'a> {
    path: &'a Path,
    size: u64,
    writer: BufWriter<DiskFile>,
}

/// An entry of the file while it is written.
pub(crate) struct Entry<'a, 'f> {
    file: &'a mut PartFile<'f>,
    wanted: u64,
    found: u64,
    sum: Summing,
    checksums: Vec<Checksum>,
}

impl<'f> PartFile<'f> {
    /// A new file, which will have `size` bytes.
    pub fn create(disk: &Disk, path: &'f Path, size: u64) -> Result<Self, CheckpointError> {
        Ok(Self {
            path,
            size,
            writer: BufWriter::with_capacity(BUFFER, disk.create(path)?),
        })
    }

    pub fn write(&mut self, bytes: &[u8]) -> Result<(), CheckpointError> {
        let result = self.writer.write_all(bytes);
        result.map_err(|error| self.failed(error))
    }

    /// The next entry, of `wanted` bytes.
    pub fn entry<'a>(&'a mut self, wanted: u64) -> Entry<'a, 'f> {
        Entry {
            file: self,
            wanted,
            found: 0,
            sum: Summing::default(),
            checksums: vec![],
        }
    }

    /// Waits until all of it is on the disk.
    pub fn finish(mut self) -> Result<(), CheckpointError> {
        let result = self.writer.flush();
        result.map_err(|error| self.failed(error))?;
        self.writer.get_ref().sync()
    }

    fn failed(&self, source: io::Error) -> CheckpointError {
        CheckpointError::Write {
            path: self.path.to_path_buf(),
            total: self.size,
            source,
        }
    }
}

impl Entry<'_, '_> {
    /// Writes its next bytes. Those that it has no room for are counted, and not written.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), CheckpointError> {
        let before = self.found;
        self.found += bytes.len() as u64;
        if self.found > self.wanted {
            return Ok(());
        }
        let in_chunk = before as usize % CHUNK;
        let (first, others) = bytes.split_at(bytes.len().min(CHUNK - in_chunk));
        for chunk in std::iter::once(first).chain(others.chunks(CHUNK)) {
            for step in chunk.chunks(STEP) {
                self.file.write(step)?;
                self.sum.add(step);
            }
            if self.sum.bytes() == CHUNK {
                self.checksums.push(self.sum.take());
            }
        }
        Ok(())
    }

    /// The checksums of its chunks; how many bytes came, where those are not all of it or too many.
    pub fn finish(mut self) -> Result<Vec<Checksum>, u64> {
        if self.found != self.wanted {
            return Err(self.found);
        }
        if self.sum.bytes() > 0 {
            self.checksums.push(self.sum.take());
        }
        Ok(self.checksums)
    }
}
