//! Writes a rank's data file and computes its checksums.

use std::io::{self, BufWriter, Write};
use std::path::Path;

use super::checksum::{CHECKSUM_CHUNK, StreamingChecksum};
use super::disk::{Disk, DiskFile};
use super::{CheckpointError, Checksum};

/// The size of the buffer for small writes, in bytes.
const BUFFER: usize = 1 << 20;

/// The number of bytes of a large write that are processed at once. They are few enough to stay in the cache of the CPU
/// core until the checksum is computed.
const STEP: usize = 1 << 18;

/// The data file that a rank is writing.
pub(super) struct PartWriter<'a> {
    path: &'a Path,
    size: u64,
    writer: BufWriter<DiskFile>,
}

/// An entry of the file that is being written.
pub struct EntryWriter<'a, 'f> {
    file: &'a mut PartWriter<'f>,
    wanted: u64,
    found: u64,
    sum: StreamingChecksum,
    checksums: Vec<Checksum>,
}

impl<'f> PartWriter<'f> {
    /// Creates the file at `path`. `size` is the size that the complete file will have, in bytes.
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

    /// Begins the next entry, with a size of `wanted` bytes.
    pub fn entry<'a>(&'a mut self, wanted: u64) -> EntryWriter<'a, 'f> {
        EntryWriter {
            file: self,
            wanted,
            found: 0,
            sum: StreamingChecksum::default(),
            checksums: vec![],
        }
    }

    /// Writes the buffered bytes and syncs the file to disk.
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

impl EntryWriter<'_, '_> {
    /// Writes the next bytes of the entry. Bytes beyond the size of the entry are counted but not written.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), CheckpointError> {
        let before = self.found;
        self.found += bytes.len() as u64;
        if self.found > self.wanted {
            return Ok(());
        }
        let in_chunk = before as usize % CHECKSUM_CHUNK;
        let (first, others) = bytes.split_at(bytes.len().min(CHECKSUM_CHUNK - in_chunk));
        for chunk in std::iter::once(first).chain(others.chunks(CHECKSUM_CHUNK)) {
            for step in chunk.chunks(STEP) {
                self.file.write(step)?;
                self.sum.add(step);
            }
            if self.sum.bytes() == CHECKSUM_CHUNK {
                self.checksums.push(self.sum.take());
            }
        }
        Ok(())
    }

    /// Ends the entry and returns the checksums of its chunks. If the number of written bytes differs from the size of
    /// the entry, `Err` contains this number.
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
