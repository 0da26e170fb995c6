//! Whether every byte of a checkpoint is as it was written.

use rayon::prelude::*;

use super::header::{self, HeaderEntry};
use super::reader::Stored;
use super::{Checkpoint, CheckpointError, Checksum, FileEntry, ObjectEntry};

/// Chunks that are read between two reports.
const BATCH: usize = 32;

/// What a checkpoint has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Files of data.
    pub files: usize,
    /// Tensors.
    pub tensors: usize,
    /// Pieces of tensors.
    pub pieces: usize,
    /// Elements of tensors.
    pub elements: u64,
    /// Objects.
    pub objects: usize,
    /// Bytes of all files of data.
    pub bytes: u64,
}

/// A chunk, of what.
struct Chunk<'a> {
    stored: Stored<'a>,
    number: usize,
    name: String,
}

impl Checkpoint {
    /// What it has, by its manifest.
    pub fn totals(&self) -> Totals {
        let manifest = self.manifest();
        let pieces = manifest.tensors.iter().flat_map(|tensor| &tensor.pieces);
        Totals {
            files: manifest.files.len(),
            tensors: manifest.tensors.len(),
            pieces: pieces.clone().count(),
            elements: pieces.map(|piece| piece.slice.len() as u64).sum(),
            objects: manifest.objects.len(),
            bytes: manifest.files.iter().map(|file| file.size).sum(),
        }
    }

    /// Reads everything and compares it with its checksums. `progress` gets the bytes that were read since
    /// its last call.
    ///
    /// # Errors
    ///
    /// The first of [`Self::faults`].
    pub fn verify(&self, progress: &mut dyn FnMut(u64)) -> Result<Totals, CheckpointError> {
        match self.faults(progress).into_iter().next() {
            None => Ok(self.totals()),
            Some(fault) => Err(fault),
        }
    }

    /// All that [`Self::verify`] finds: a [`CheckpointError::Checksum`] for each chunk that has changed,
    /// [`CheckpointError::Corrupt`] for headers, [`CheckpointError::Io`].
    pub fn faults(&self, progress: &mut dyn FnMut(u64)) -> Vec<CheckpointError> {
        let mut faults = vec![];
        for (number, file) in self.manifest().files.iter().enumerate() {
            faults.extend(self.check_header(number, file).err());
            progress(file.header);
        }
        let chunks = self.chunks();
        for batch in chunks.chunks(BATCH) {
            let check = |chunk: &Chunk| {
                let name = || chunk.name.clone();
                chunk.stored.verify(chunk.number, name).err()
            };
            faults.par_extend(batch.par_iter().filter_map(check));
            let sizes = batch.iter().map(|chunk| chunk.stored.size_of(chunk.number));
            progress(sizes.sum());
        }
        faults
    }

    /// All chunks, file by file and in the order in which they lie there.
    fn chunks(&self) -> Vec<Chunk<'_>> {
        let mut stored = vec![];
        for tensor in &self.manifest().tensors {
            for (index, piece) in tensor.pieces.iter().enumerate() {
                let name = tensor.name_of(&piece.slice);
                stored.push((piece.file, name, self.stored_piece(tensor, index)));
            }
        }
        for object in &self.manifest().objects {
            let name = ObjectEntry::name(&object.key);
            stored.push((object.file, name, self.stored_object(object)));
        }
        stored.sort_by_key(|(file, _, stored)| (*file, stored.begin));
        let chunks = stored.into_iter().flat_map(|(_, name, stored)| {
            let numbers = 0..stored.checksums.len();
            numbers.map(move |number| Chunk {
                stored,
                number,
                name: name.clone(),
            })
        });
        chunks.collect()
    }

    /// Compares the header of a file, which other programs read, with its checksum and the manifest.
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
        match found == self.entries(number) {
            true => Ok(()),
            false => Err(corrupt(
                "its header names other tensors than the manifest".into(),
            )),
        }
    }

    /// The entries that a file should have, in their order.
    fn entries(&self, file: usize) -> Vec<HeaderEntry> {
        let mut entries = vec![];
        for tensor in &self.manifest().tensors {
            let pieces = tensor.pieces.iter().filter(|piece| piece.file == file);
            entries.extend(pieces.map(|piece| HeaderEntry {
                name: tensor.name_of(&piece.slice),
                dtype: header::dtype(tensor.dtype),
                shape: piece.slice.shape.clone(),
                begin: piece.begin,
                size: (piece.slice.len() * tensor.dtype.size()) as u64,
            }));
        }
        let objects = self.manifest().objects.iter();
        let objects = objects.filter(|object| object.file == file);
        entries.extend(objects.map(|object| HeaderEntry {
            name: ObjectEntry::name(&object.key),
            dtype: safetensors::Dtype::U8,
            shape: vec![object.size as usize],
            begin: object.begin,
            size: object.size,
        }));
        entries.sort_by_key(|entry| (entry.begin, entry.size));
        entries
    }
}
