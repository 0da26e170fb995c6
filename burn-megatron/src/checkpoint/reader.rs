//! A checkpoint that is read.

use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use super::checksum::CHUNK;
use super::file::DataFile;
use super::folder::LATEST;
use super::manifest::MANIFEST;
use super::{
    About, CheckpointError, CheckpointFolder, Checksum, Manifest, ObjectEntry, Run, Slice,
    TensorEntry, TensorMeta, TensorSource, disk, source::check_length,
};

/// Longer manifests are not read: they would not fit the memory.
const LONGEST_MANIFEST: u64 = 4 << 30;

/// A published checkpoint.
///
/// What is read is checked, in chunks of 4 MiB; each chunk once.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
    files: Vec<DataFile>,
    /// For each tensor the number of the first chunk of each of its pieces.
    first_chunks: Vec<Vec<usize>>,
    /// Which chunks were found to be as they were written.
    checked: Vec<AtomicBool>,
}

/// Bytes in a file with their checksums.
#[derive(Clone, Copy)]
pub(super) struct Stored<'a> {
    pub file: &'a DataFile,
    pub begin: u64,
    pub size: u64,
    pub checksums: &'a [Checksum],
}

impl<'a> Stored<'a> {
    /// How long a chunk is.
    pub fn size_of(&self, chunk: usize) -> u64 {
        let start = chunk as u64 * CHUNK as u64;
        (self.size - start).min(CHUNK as u64)
    }

    /// Where the bytes of a chunk lie.
    fn range(&self, chunk: usize) -> Range<u64> {
        let begin = self.begin + chunk as u64 * CHUNK as u64;
        begin..begin + self.size_of(chunk)
    }

    /// The bytes of a chunk.
    pub fn chunk(&self, chunk: usize) -> Result<&'a [u8], CheckpointError> {
        self.file.bytes(self.range(chunk))
    }

    /// Compares a chunk with its checksum.
    pub fn check(&self, chunk: usize, name: impl Fn() -> String) -> Result<(), CheckpointError> {
        self.compare(self.chunk(chunk)?, chunk, name)
    }

    /// Reads a chunk without the map, and compares it with its checksum.
    pub fn verify(&self, chunk: usize, name: impl Fn() -> String) -> Result<(), CheckpointError> {
        self.compare(&self.file.read(self.range(chunk))?, chunk, name)
    }

    fn compare(
        &self,
        bytes: &[u8],
        chunk: usize,
        name: impl Fn() -> String,
    ) -> Result<(), CheckpointError> {
        match Checksum::of(bytes) == self.checksums[chunk] {
            true => Ok(()),
            false => Err(CheckpointError::Checksum {
                path: self.file.path().to_path_buf(),
                key: name(),
                chunk: chunk + 1,
                chunks: self.checksums.len(),
            }),
        }
    }
}

impl Checkpoint {
    /// Opens a checkpoint; of a folder of checkpoints the latest; of the folder of a run the latest in its
    /// `checkpoints`. The manifest is checked, and the sizes of all files, but not their data.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::NoCheckpoint`] if there is none; [`CheckpointError::Corrupt`] and the other errors
    /// of [`Manifest::parse`]; [`CheckpointError::Io`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        let path = path.as_ref();
        if path.join(MANIFEST).exists() {
            return Self::open_at(path.to_path_buf());
        }
        let of_run = path.join("checkpoints");
        let folder = match of_run.is_dir() && !path.join(LATEST).exists() {
            true => CheckpointFolder::open(of_run)?,
            false => CheckpointFolder::open(path)?,
        };
        let names = || {
            folder
                .names()
                .map(|names| names.into_iter().map(|name| name.text()))
        };
        match folder.latest()? {
            Some(checkpoint) => Ok(checkpoint),
            None => Err(CheckpointError::NoCheckpoint {
                path: folder.path().to_path_buf(),
                there: names()?.collect(),
            }),
        }
    }

    pub(super) fn open_at(path: PathBuf) -> Result<Self, CheckpointError> {
        let file = path.join(MANIFEST);
        let failed = |error| CheckpointError::io("read", &file, error);
        let opened = disk::open_to_read(&file)?;
        let size = opened.metadata().map_err(failed)?.len();
        if size > LONGEST_MANIFEST {
            let what = format!("it has {size} bytes, and {LONGEST_MANIFEST} is the most");
            return Err(CheckpointError::corrupt(&file, what));
        }
        let mut bytes = vec![];
        opened
            .take(LONGEST_MANIFEST)
            .read_to_end(&mut bytes)
            .map_err(failed)?;
        let manifest = Manifest::parse_of(&bytes, &file)?;
        Self::with_manifest(path, manifest)
    }

    pub(super) fn with_manifest(
        path: PathBuf,
        manifest: Manifest,
    ) -> Result<Self, CheckpointError> {
        let files = manifest.files.iter();
        let files = files.map(|file| DataFile::open(path.join(&file.name), file.size));
        let files = files.collect::<Result<Vec<_>, _>>()?;
        let mut chunks = 0;
        let mut next = |count: usize| {
            chunks += count;
            chunks - count
        };
        let first_chunks = manifest.tensors.iter().map(|tensor| {
            let pieces = tensor.pieces.iter();
            pieces.map(|piece| next(piece.checksums.len())).collect()
        });
        let first_chunks = first_chunks.collect();
        Ok(Self {
            path,
            manifest,
            files,
            first_chunks,
            checked: (0..chunks).map(|_| AtomicBool::new(false)).collect(),
        })
    }

    /// Its folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it is of.
    pub fn about(&self) -> &About {
        &self.manifest.about
    }

    /// What lies where in it.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    pub(super) fn files(&self) -> &[DataFile] {
        &self.files
    }

    /// The names of the objects, sorted.
    pub fn objects(&self) -> Vec<String> {
        let objects = self.manifest.objects.iter();
        objects.map(|object| object.key.clone()).collect()
    }

    /// The bytes of an object.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Missing`], [`CheckpointError::Checksum`], [`CheckpointError::Io`].
    pub fn object(&self, key: &str) -> Result<Vec<u8>, CheckpointError> {
        let objects = &self.manifest.objects;
        let found = objects.binary_search_by(|object| object.key[..].cmp(key));
        let object = &objects[found.map_err(|_| self.missing(key))?];
        let stored = self.stored_object(object);
        let mut bytes = vec![];
        for chunk in 0..object.checksums.len() {
            stored.check(chunk, || ObjectEntry::name(key))?;
            bytes.extend_from_slice(stored.chunk(chunk)?);
        }
        Ok(bytes)
    }

    pub(super) fn stored_object<'a>(&'a self, object: &'a ObjectEntry) -> Stored<'a> {
        Stored {
            file: &self.files[object.file],
            begin: object.begin,
            size: object.size,
            checksums: &object.checksums,
        }
    }

    pub(super) fn stored_piece<'a>(&'a self, tensor: &'a TensorEntry, piece: usize) -> Stored<'a> {
        let piece = &tensor.pieces[piece];
        Stored {
            file: &self.files[piece.file],
            begin: piece.begin,
            size: (piece.slice.len() * tensor.dtype.size()) as u64,
            checksums: &piece.checksums,
        }
    }

    fn missing(&self, key: &str) -> CheckpointError {
        CheckpointError::Missing {
            of: self.name(),
            keys: vec![key.to_string()],
        }
    }

    fn index(&self, key: &str) -> Option<usize> {
        let tensors = &self.manifest.tensors;
        tensors
            .binary_search_by(|tensor| tensor.key[..].cmp(key))
            .ok()
    }

    /// Copies what a piece has of a box of its tensor.
    fn copy(
        &self,
        tensor: usize,
        piece: usize,
        slice: &Slice,
        to: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let first_chunk = self.first_chunks[tensor][piece];
        let tensor = &self.manifest.tensors[tensor];
        let (size, own) = (tensor.dtype.size(), &tensor.pieces[piece].slice);
        let Some(both) = own.intersection(slice) else {
            return Ok(());
        };
        let stored = self.stored_piece(tensor, piece);
        let from_runs = both.within(own).runs(&own.shape);
        let to_runs = both.within(slice).runs(&slice.shape);
        for (from, at, len) in common(&from_runs, &to_runs) {
            let (from, at, len) = (from * size, at * size, len * size);
            // Chunk by chunk, so that what was checked is copied from the cache.
            for chunk in from / CHUNK..(from + len).div_ceil(CHUNK) {
                let checked = &self.checked[first_chunk + chunk];
                if !checked.load(Ordering::Relaxed) {
                    stored.check(chunk, || tensor.name_of(own))?;
                    checked.store(true, Ordering::Relaxed);
                }
                let begin = from.max(chunk * CHUNK);
                let end = (from + len).min((chunk + 1) * CHUNK);
                let bytes = stored.begin + begin as u64..stored.begin + end as u64;
                to[at + begin - from..at + end - from].copy_from_slice(stored.file.bytes(bytes)?);
            }
        }
        Ok(())
    }
}

/// The stretches that two lists of runs, of the same elements in two tensors, have in common: where they
/// begin in either tensor, and how long they are.
fn common<'a>(from: &'a [Run], to: &'a [Run]) -> impl Iterator<Item = (usize, usize, usize)> + 'a {
    let (mut i, mut j, mut done) = (0, 0, 0);
    std::iter::from_fn(move || {
        let (a, b) = (from.get(i)?, to.get(j)?);
        let end = |run: &Run| run.in_slice + run.len;
        let next = end(a).min(end(b));
        let at = |run: &Run| run.in_tensor + done - run.in_slice;
        let stretch = (at(a), at(b), next - done);
        i += usize::from(end(a) == next);
        j += usize::from(end(b) == next);
        done = next;
        Some(stretch)
    })
}

impl TensorSource for Checkpoint {
    fn name(&self) -> String {
        self.path.display().to_string()
    }

    fn keys(&self) -> Vec<String> {
        let tensors = self.manifest.tensors.iter();
        tensors.map(|tensor| tensor.key.clone()).collect()
    }

    fn tensor(&self, key: &str) -> Option<TensorMeta> {
        self.index(key)
            .map(|index| self.manifest.tensors[index].meta())
    }

    fn read(&self, key: &str, slice: &Slice) -> Result<Vec<u8>, CheckpointError> {
        let tensor = self.tensor(key).ok_or_else(|| self.missing(key))?;
        // Nothing is set aside for a box that does not lie in the tensor.
        let size = match slice.fits(&tensor.shape) {
            true => slice.len() * tensor.dtype.size(),
            false => 0,
        };
        let mut bytes = vec![0; size];
        self.read_into(key, slice, &mut bytes)?;
        Ok(bytes)
    }

    fn read_into(&self, key: &str, slice: &Slice, to: &mut [u8]) -> Result<(), CheckpointError> {
        let index = self.index(key).ok_or_else(|| self.missing(key))?;
        let tensor = &self.manifest.tensors[index];
        if !slice.fits(&tensor.shape) {
            return Err(CheckpointError::Slice {
                key: key.into(),
                shape: tensor.shape.clone(),
                slice: slice.clone(),
            });
        }
        check_length(key, slice, to.len(), slice.len() * tensor.dtype.size())?;
        if slice.is_empty() {
            return Ok(());
        }
        for piece in 0..tensor.pieces.len() {
            self.copy(index, piece, slice, to)?;
        }
        Ok(())
    }
}
