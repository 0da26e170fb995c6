//! Reads the safetensors files of a folder and their index. The files may be corrupt, so their content is checked.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use burn_megatron::checkpoint::{
    CheckpointError, ElementType, HEADER_LENGTH_BYTES, HeaderEntry, MAX_HEADER_BYTES, parse_header,
    unique_keys,
};
use burn_megatron::regular_file::{self, is_there};
use safetensors::Dtype;
use serde::Deserialize;

/// The size of the length prefix, in bytes.
const LENGTH: u64 = HEADER_LENGTH_BYTES as u64;
/// The maximum size of a header or an index, in bytes.
const LONGEST: u64 = MAX_HEADER_BYTES as u64;

/// The file of an unsharded model.
pub(super) const SINGLE: &str = "model.safetensors";
/// The index of a sharded model.
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// The tensors in the files, keyed by name. Each has the index of its file and its header entry.
pub(super) type StoredTensors = BTreeMap<String, (usize, HeaderEntry)>;

/// An open safetensors file.
#[derive(Debug)]
pub(super) struct ShardFile {
    path: PathBuf,
    file: File,
    /// The number of tensor bytes that were read so far.
    bytes_read: AtomicU64,
}

impl ShardFile {
    /// Opens a file and parses its header.
    pub fn open(path: &Path) -> Result<(Self, Vec<HeaderEntry>), CheckpointError> {
        let io = |error| CheckpointError::io("read", path, error);
        let corrupt = |what: String| CheckpointError::corrupt(path, what);
        let file = regular_file::open(path).map_err(io)?;
        let size = file.metadata().map_err(io)?.len();
        if size < LENGTH {
            return Err(corrupt(format!(
                "it has {size} bytes, too few for a header"
            )));
        }
        let mut length = [0; HEADER_LENGTH_BYTES];
        read_at(&file, &mut length, 0).map_err(io)?;
        let length = u64::from_le_bytes(length);
        let most = LONGEST.min(size - LENGTH);
        if length > most {
            let what = format!(
                "its header has {length} bytes: expected at most {most}; it is damaged, or not a safetensors file"
            );
            return Err(corrupt(what));
        }
        let mut header = vec![0; (LENGTH + length) as usize];
        read_at(&file, &mut header, 0).map_err(io)?;
        let stored = parse_header(&header, size).map_err(corrupt)?;
        let shard = Self {
            path: path.to_path_buf(),
            file,
            bytes_read: AtomicU64::new(0),
        };
        Ok((shard, stored))
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the number of bytes that were read so far, without the header.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }

    /// Reads `bytes.len()` bytes, starting at the offset `at` of the file.
    pub fn read(&self, bytes: &mut [u8], at: u64) -> Result<(), CheckpointError> {
        self.bytes_read
            .fetch_add(bytes.len() as u64, Ordering::Relaxed);
        let read = read_at(&self.file, bytes, at);
        read.map_err(|error| CheckpointError::io("read", &self.path, error))
    }
}

/// Reads a range without changing the position of the file. Returns an error if the file was truncated.
#[cfg(unix)]
fn read_at(file: &File, bytes: &mut [u8], at: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, bytes, at)
}

/// Reads a range without changing the position of the file. Returns an error if the file was truncated.
#[cfg(windows)]
fn read_at(file: &File, mut bytes: &mut [u8], mut at: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, bytes, at)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => (bytes, at) = (&mut bytes[read..], at + read as u64),
        }
    }
    Ok(())
}

/// Returns the element type, if it is supported for weights.
pub(super) fn element_type(dtype: Dtype) -> Option<ElementType> {
    match dtype {
        Dtype::F64 => Some(ElementType::F64),
        Dtype::F32 => Some(ElementType::F32),
        Dtype::F16 => Some(ElementType::F16),
        Dtype::BF16 => Some(ElementType::Bf16),
        _ => None,
    }
}

/// The content of a `model.safetensors.index.json`, which lists the file of each tensor.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct ShardIndex {
    /// The name of the file that contains each tensor, keyed by the name of the tensor. The files are in the same
    /// folder as the index.
    #[serde(deserialize_with = "unique_keys")]
    pub weight_map: BTreeMap<String, String>,
}

impl ShardIndex {
    /// Parses the content of an index file.
    ///
    /// # Errors
    ///
    /// A description of the error: invalid JSON, a missing `weight_map`, or a file outside of the folder.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        let index: Self = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        let is_beside = |file: &str| {
            !file.is_empty() && !file.contains(['/', '\\', ':', '\0']) && !file.starts_with('.')
        };
        match index.weight_map.iter().find(|(_, file)| !is_beside(file)) {
            None => Ok(index),
            Some((tensor, file)) => Err(format!(
                "{tensor} is in {file:?}: expected the name of a file next to the index"
            )),
        }
    }
}

/// Reads a small file.
pub(super) fn read_text(path: &Path) -> Result<Vec<u8>, CheckpointError> {
    regular_file::read(path, LONGEST).map_err(|error| CheckpointError::io("read", path, error))
}

/// Opens the safetensors files of a folder.
pub(super) fn open_shards(
    folder: &Path,
) -> Result<(Vec<ShardFile>, StoredTensors), CheckpointError> {
    let single = folder.join(SINGLE);
    if is_there(&single) {
        let (shard, stored) = ShardFile::open(&single)?;
        let named = stored
            .into_iter()
            .map(|stored| (stored.name.clone(), (0, stored)));
        return Ok((vec![shard], named.collect()));
    }
    let path = folder.join(INDEX);
    if !is_there(&path) {
        let what = format!("it has neither {SINGLE} nor {INDEX}");
        return Err(CheckpointError::corrupt(folder, what));
    }
    let corrupt = |what| CheckpointError::corrupt(&path, what);
    let index = ShardIndex::parse(&read_text(&path)?).map_err(corrupt)?;
    let files: BTreeSet<&String> = index.weight_map.values().collect();
    let (mut shards, mut found) = (vec![], StoredTensors::new());
    for file in files {
        let (shard, stored) = ShardFile::open(&folder.join(file))?;
        for stored in stored {
            if index.weight_map.get(&stored.name) != Some(file) {
                let what = format!(
                    "{file} has {}, which the index does not list there",
                    stored.name
                );
                return Err(corrupt(what));
            }
            found.insert(stored.name.clone(), (shards.len(), stored));
        }
        shards.push(shard);
    }
    match index
        .weight_map
        .iter()
        .find(|(name, _)| !found.contains_key(*name))
    {
        None => Ok((shards, found)),
        Some((name, file)) => Err(corrupt(format!(
            "{name} is not in {file}, where the index lists it"
        ))),
    }
}
