//! Reads checkpoints. The main entry point is [`Checkpoint::open`].

use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use super::checksum::CHECKSUM_CHUNK;
use super::folder::LATEST;
use super::manifest::MANIFEST;
use super::mapped_file::MappedFile;
use super::{
    CheckpointError, CheckpointFolder, CheckpointMetadata, Checksum, ContiguousRun, Manifest,
    ObjectEntry, TensorEntry, TensorMeta, TensorSlice, TensorSource, disk, source::check_length,
};

/// The maximum size of a manifest that is read, in bytes.
const MAX_MANIFEST_BYTES: u64 = 4 << 30;

/// A published checkpoint that is open for reading.
///
/// Data is verified when it is first read, in chunks of 4 MiB.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
    files: Vec<MappedFile>,
    /// The index in `checked` of the first chunk of each tensor and shard.
    first_chunks: Vec<Vec<usize>>,
    /// Whether each chunk has been verified.
    checked: Vec<AtomicBool>,
}

/// A range of a file with the checksums of its chunks.
#[derive(Clone, Copy)]
pub(super) struct ChecksummedRange<'a> {
    pub file: &'a MappedFile,
    pub begin: u64,
    pub size: u64,
    pub checksums: &'a [Checksum],
}

impl<'a> ChecksummedRange<'a> {
    /// Returns the size of a chunk in bytes.
    pub fn size_of(&self, chunk: usize) -> u64 {
        let start = chunk as u64 * CHECKSUM_CHUNK as u64;
        (self.size - start).min(CHECKSUM_CHUNK as u64)
    }

    /// Returns the range of a chunk in the file.
    fn range(&self, chunk: usize) -> Range<u64> {
        let begin = self.begin + chunk as u64 * CHECKSUM_CHUNK as u64;
        begin..begin + self.size_of(chunk)
    }

    /// Returns the bytes of a chunk.
    pub fn chunk(&self, chunk: usize) -> Result<&'a [u8], CheckpointError> {
        self.file.bytes(self.range(chunk))
    }

    /// Verifies a chunk.
    pub fn check(&self, chunk: usize, name: impl Fn() -> String) -> Result<(), CheckpointError> {
        self.compare(self.chunk(chunk)?, chunk, name)
    }

    /// Verifies a chunk. The chunk is read without the memory mapping.
    pub fn verify(&self, chunk: usize, name: impl Fn() -> String) -> Result<(), CheckpointError> {
        self.compare(&self.file.read(self.range(chunk))?, chunk, name)
    }

    fn compare(
        &self,
        bytes: &[u8],
        chunk: usize,
        name: impl Fn() -> String,
    ) -> Result<(), CheckpointError> {
        if Checksum::of(bytes) == self.checksums[chunk] {
            Ok(())
        } else {
            Err(CheckpointError::Checksum {
                path: self.file.path().to_path_buf(),
                key: name(),
                chunk: chunk + 1,
                chunks: self.checksums.len(),
            })
        }
    }
}

impl Checkpoint {
    /// Opens a checkpoint. `path` is the checkpoint itself, a folder of checkpoints or a run folder. The latest
    /// checkpoint of a folder is opened. The manifest and the sizes of all files are validated, but the data is not
    /// read.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::NoCheckpoint`] if there is no checkpoint; [`CheckpointError::Corrupt`] and the other
    /// errors of [`Manifest::parse`] for invalid content; [`CheckpointError::Io`] for failed reads.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        let path = path.as_ref();
        if path.join(MANIFEST).exists() {
            return Self::open_at(path.to_path_buf());
        }
        let of_run = path.join("checkpoints");
        let folder = if of_run.is_dir() && !path.join(LATEST).exists() {
            CheckpointFolder::open(of_run)?
        } else {
            CheckpointFolder::open(path)?
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
        if size > MAX_MANIFEST_BYTES {
            let what =
                format!("it has {size} bytes, more than the {MAX_MANIFEST_BYTES} that are read");
            return Err(CheckpointError::corrupt(&file, what));
        }
        let mut bytes = vec![];
        opened
            .take(MAX_MANIFEST_BYTES)
            .read_to_end(&mut bytes)
            .map_err(failed)?;
        let manifest = Manifest::parse_of(&bytes, &file)?;
        Self::with_manifest(path, manifest)
    }

    pub(super) fn with_manifest(
        path: PathBuf,
        manifest: Manifest,
    ) -> Result<Self, CheckpointError> {
        let files = manifest
            .files
            .iter()
            .map(|file| MappedFile::open(path.join(&file.name), file.size))
            .collect::<Result<Vec<_>, _>>()?;
        let mut chunks = 0;
        let mut next = |count: usize| {
            chunks += count;
            chunks - count
        };
        let first_chunks = manifest
            .tensors
            .iter()
            .map(|tensor| {
                let shards = tensor.shards.iter();
                shards.map(|shard| next(shard.checksums.len())).collect()
            })
            .collect();
        Ok(Self {
            path,
            manifest,
            files,
            first_chunks,
            checked: (0..chunks).map(|_| AtomicBool::new(false)).collect(),
        })
    }

    /// Returns the folder of the checkpoint.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the metadata: the step, the number of samples, the layout, the recipe and the state of the run.
    pub fn metadata(&self) -> &CheckpointMetadata {
        &self.manifest.metadata
    }

    /// Returns the manifest of the checkpoint.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    pub(super) fn files(&self) -> &[MappedFile] {
        &self.files
    }

    /// Returns the keys of all objects in the checkpoint, sorted.
    pub fn objects(&self) -> Vec<String> {
        let objects = self.manifest.objects.iter();
        objects.map(|object| object.key.clone()).collect()
    }

    /// Reads the bytes of the object with this key.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Missing`] for an unknown key; [`CheckpointError::Checksum`] if the data has changed;
    /// [`CheckpointError::Io`] for failed reads.
    pub fn object(&self, key: &str) -> Result<Vec<u8>, CheckpointError> {
        let objects = &self.manifest.objects;
        let found = objects.binary_search_by(|object| object.key[..].cmp(key));
        let object = &objects[found.map_err(|_| self.missing(key))?];
        let stored = self.object_range(object);
        let mut bytes = vec![];
        for chunk in 0..object.checksums.len() {
            stored.check(chunk, || ObjectEntry::name(key))?;
            bytes.extend_from_slice(stored.chunk(chunk)?);
        }
        Ok(bytes)
    }

    pub(super) fn object_range<'a>(&'a self, object: &'a ObjectEntry) -> ChecksummedRange<'a> {
        ChecksummedRange {
            file: &self.files[object.file],
            begin: object.begin,
            size: object.size,
            checksums: &object.checksums,
        }
    }

    pub(super) fn shard_range<'a>(
        &'a self,
        tensor: &'a TensorEntry,
        shard: usize,
    ) -> ChecksummedRange<'a> {
        let shard = &tensor.shards[shard];
        ChecksummedRange {
            file: &self.files[shard.file],
            begin: shard.begin,
            size: (shard.slice.len() * tensor.dtype.size()) as u64,
            checksums: &shard.checksums,
        }
    }

    fn missing(&self, key: &str) -> CheckpointError {
        CheckpointError::missing(self.name(), key)
    }

    fn index(&self, key: &str) -> Option<usize> {
        let tensors = &self.manifest.tensors;
        tensors
            .binary_search_by(|tensor| tensor.key[..].cmp(key))
            .ok()
    }

    /// Copies the intersection of a shard and a slice of its tensor.
    fn copy(
        &self,
        tensor: usize,
        shard: usize,
        slice: &TensorSlice,
        to: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let first_chunk = self.first_chunks[tensor][shard];
        let tensor = &self.manifest.tensors[tensor];
        let (size, own) = (tensor.dtype.size(), &tensor.shards[shard].slice);
        let Some(both) = own.intersection(slice) else {
            return Ok(());
        };
        let stored = self.shard_range(tensor, shard);
        let from_runs = both.within(own).runs(&own.shape);
        let to_runs = both.within(slice).runs(&slice.shape);
        for (from, at, len) in common(&from_runs, &to_runs) {
            let (from, at, len) = (from * size, at * size, len * size);
            // Data is copied chunk by chunk, so that data that was just verified is read from the cache.
            for chunk in from / CHECKSUM_CHUNK..(from + len).div_ceil(CHECKSUM_CHUNK) {
                let checked = &self.checked[first_chunk + chunk];
                if !checked.load(Ordering::Relaxed) {
                    stored.check(chunk, || tensor.name_of(own))?;
                    checked.store(true, Ordering::Relaxed);
                }
                let begin = from.max(chunk * CHECKSUM_CHUNK);
                let end = (from + len).min((chunk + 1) * CHECKSUM_CHUNK);
                let bytes = stored.begin + begin as u64..stored.begin + end as u64;
                to[at + begin - from..at + end - from].copy_from_slice(stored.file.bytes(bytes)?);
            }
        }
        Ok(())
    }
}

/// Returns the contiguous ranges that are common to two lists of runs, given as the start in each tensor and the
/// length. Both lists cover the same elements, in two tensors.
fn common<'a>(
    from: &'a [ContiguousRun],
    to: &'a [ContiguousRun],
) -> impl Iterator<Item = (usize, usize, usize)> + 'a {
    let (mut i, mut j, mut done) = (0, 0, 0);
    std::iter::from_fn(move || {
        let (a, b) = (from.get(i)?, to.get(j)?);
        let end = |run: &ContiguousRun| run.in_slice + run.len;
        let next = end(a).min(end(b));
        let at = |run: &ContiguousRun| run.in_tensor + done - run.in_slice;
        let range = (at(a), at(b), next - done);
        i += usize::from(end(a) == next);
        j += usize::from(end(b) == next);
        done = next;
        Some(range)
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

    fn read(&self, key: &str, slice: &TensorSlice) -> Result<Vec<u8>, CheckpointError> {
        let tensor = self.tensor(key).ok_or_else(|| self.missing(key))?;
        let mut bytes = vec![0; tensor.slice_bytes(slice)?];
        self.read_into(key, slice, &mut bytes)?;
        Ok(bytes)
    }

    fn read_into(
        &self,
        key: &str,
        slice: &TensorSlice,
        to: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let index = self.index(key).ok_or_else(|| self.missing(key))?;
        let tensor = &self.manifest.tensors[index];
        check_length(key, slice, to.len(), tensor.meta().slice_bytes(slice)?)?;
        if slice.is_empty() {
            return Ok(());
        }
        for shard in 0..tensor.shards.len() {
            self.copy(index, shard, slice, to)?;
        }
        Ok(())
    }
}
