//! Verifies every byte of a checkpoint.

use rayon::prelude::*;

use super::header::{self, HeaderEntry};
use super::reader::ChecksummedRange;
use super::{Checkpoint, CheckpointError, Checksum, FileEntry, ObjectEntry};

/// The number of chunks per call of `progress`.
const REPORT_CHUNKS: usize = 32;

/// The number of files, tensors, objects and bytes of a checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckpointTotals {
    /// The number of data files.
    pub files: usize,
    /// The number of tensors.
    pub tensors: usize,
    /// The number of shards of all tensors.
    pub shards: usize,
    /// The number of elements of all tensors.
    pub elements: u64,
    /// The number of objects.
    pub objects: usize,
    /// The number of bytes in all data files.
    pub bytes: u64,
}

/// A chunk of a shard or object.
struct ChunkRef<'a> {
    stored: ChecksummedRange<'a>,
    number: usize,
    name: String,
}

impl Checkpoint {
    /// Counts the files, tensors, objects and bytes of the checkpoint that the manifest lists.
    pub fn totals(&self) -> CheckpointTotals {
        let manifest = self.manifest();
        let shards = manifest.tensors.iter().flat_map(|tensor| &tensor.shards);
        CheckpointTotals {
            files: manifest.files.len(),
            tensors: manifest.tensors.len(),
            shards: shards.clone().count(),
            elements: shards.map(|shard| shard.slice.len() as u64).sum(),
            objects: manifest.objects.len(),
            bytes: manifest.files.iter().map(|file| file.size).sum(),
        }
    }

    /// Reads all data of the checkpoint and compares it with the checksums. `progress` is called with the number of
    /// bytes that were read since the previous call.
    ///
    /// # Errors
    ///
    /// Returns the first error of [`Self::faults`].
    pub fn verify(
        &self,
        progress: &mut dyn FnMut(u64),
    ) -> Result<CheckpointTotals, CheckpointError> {
        match self.faults(progress).into_iter().next() {
            None => Ok(self.totals()),
            Some(fault) => Err(fault),
        }
    }

    /// Verifies all data like [`Self::verify`], and returns all errors: [`CheckpointError::Checksum`] for each chunk
    /// that has changed, [`CheckpointError::Corrupt`] for invalid headers, and [`CheckpointError::Io`] for failed
    /// reads.
    pub fn faults(&self, progress: &mut dyn FnMut(u64)) -> Vec<CheckpointError> {
        let mut faults = vec![];
        for (number, file) in self.manifest().files.iter().enumerate() {
            faults.extend(self.check_header(number, file).err());
            progress(file.header);
        }
        let chunks = self.chunks();
        for batch in chunks.chunks(REPORT_CHUNKS) {
            let check = |chunk: &ChunkRef| {
                let name = || chunk.name.clone();
                chunk.stored.verify(chunk.number, name).err()
            };
            faults.par_extend(batch.par_iter().filter_map(check));
            let sizes = batch.iter().map(|chunk| chunk.stored.size_of(chunk.number));
            progress(sizes.sum());
        }
        faults
    }

    /// Returns all chunks, sorted by file and offset.
    fn chunks(&self) -> Vec<ChunkRef<'_>> {
        let mut stored = vec![];
        for tensor in &self.manifest().tensors {
            for (index, shard) in tensor.shards.iter().enumerate() {
                let name = tensor.name_of(&shard.slice);
                stored.push((shard.file, name, self.shard_range(tensor, index)));
            }
        }
        for object in &self.manifest().objects {
            let name = ObjectEntry::name(&object.key);
            stored.push((object.file, name, self.object_range(object)));
        }
        stored.sort_by_key(|(file, _, stored)| (*file, stored.begin));
        let chunks = stored.into_iter().flat_map(|(_, name, stored)| {
            let numbers = 0..stored.checksums.len();
            numbers.map(move |number| ChunkRef {
                stored,
                number,
                name: name.clone(),
            })
        });
        chunks.collect()
    }

    /// Compares a file's header with its checksum and with the manifest.
    fn check_header(&self, number: usize, entry: &FileEntry) -> Result<(), CheckpointError> {
        let file = &self.files()[number];
        let bytes = &file.read(0..entry.header)?;
        let corrupt = |what: String| CheckpointError::corrupt(file.path(), what);
        if Checksum::of(bytes) != entry.checksum {
            return Err(corrupt(
                "its header has changed since it was written".into(),
            ));
        }
        let found = header::parse(bytes, entry.size).map_err(corrupt)?;
        if found == self.entries(number) {
            Ok(())
        } else {
            Err(corrupt(
                "its header and the manifest list different tensors".into(),
            ))
        }
    }

    /// Returns the entries that the manifest lists for a file, by offset.
    fn entries(&self, file: usize) -> Vec<HeaderEntry> {
        let mut entries = vec![];
        for tensor in &self.manifest().tensors {
            let shards = tensor.shards.iter().filter(|shard| shard.file == file);
            entries.extend(shards.map(|shard| tensor.header_entry(&shard.slice, shard.begin)));
        }
        let objects = self.manifest().objects.iter();
        let objects = objects.filter(|object| object.file == file);
        entries.extend(
            objects.map(|object| ObjectEntry::header_entry(&object.key, object.begin, object.size)),
        );
        entries.sort_by_key(|entry| (entry.begin, entry.size));
        entries
    }
}
