//! Files of a folder: safetensors, and the index over several of them. No number in them is trusted.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use burn_megatron::checkpoint::{
    CheckpointError, ElementType, HEADER_LENGTH, HeaderEntry, LONGEST_HEADER, parse_header,
};
use safetensors::Dtype;
use serde::Deserialize;

/// The bytes of the length before a header.
const LENGTH: u64 = HEADER_LENGTH as u64;
/// The longest header, and the longest index, that is read.
const LONGEST: u64 = LONGEST_HEADER as u64;

/// The one file of a small model.
pub(super) const SINGLE: &str = "model.safetensors";
/// The index of one in several files.
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// The tensors of the files by their names, each with the number of its file.
pub(super) type Found = BTreeMap<String, (usize, HeaderEntry)>;

/// A safetensors file, open.
#[derive(Debug)]
pub(super) struct Shard {
    path: PathBuf,
    file: File,
}

impl Shard {
    /// Opens a file, and says what is in it.
    pub fn open(path: &Path) -> Result<(Self, Vec<HeaderEntry>), CheckpointError> {
        let io = |error| CheckpointError::io("read", path, error);
        let corrupt = |what: String| CheckpointError::corrupt(path, what);
        let file = File::open(path).map_err(io)?;
        let size = file.metadata().map_err(io)?.len();
        if size < LENGTH {
            return Err(corrupt(format!("it has {size} bytes, and no header")));
        }
        let mut length = [0; HEADER_LENGTH];
        read_at(&file, &mut length, 0).map_err(io)?;
        let length = u64::from_le_bytes(length);
        let most = LONGEST.min(size - LENGTH);
        if length > most {
            let what = format!("its header is said to have {length} bytes; at most {most} can be");
            return Err(corrupt(what));
        }
        let mut header = vec![0; (LENGTH + length) as usize];
        read_at(&file, &mut header, 0).map_err(io)?;
        let stored = parse_header(&header, size).map_err(corrupt)?;
        let path = path.to_path_buf();
        Ok((Self { path, file }, stored))
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Fills `bytes` from the place `at` in the file.
    pub fn read(&self, bytes: &mut [u8], at: u64) -> Result<(), CheckpointError> {
        let read = read_at(&self.file, bytes, at);
        read.map_err(|error| CheckpointError::io("read", &self.path, error))
    }
}

/// Reads a range, wherever others read: a file that was cut meanwhile is an error.
#[cfg(unix)]
fn read_at(file: &File, bytes: &mut [u8], at: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, bytes, at)
}

/// Reads a range, wherever others read: a file that was cut meanwhile is an error.
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

/// The type, if weights of it are read.
pub(super) fn element_type(dtype: Dtype) -> Option<ElementType> {
    match dtype {
        Dtype::F64 => Some(ElementType::F64),
        Dtype::F32 => Some(ElementType::F32),
        Dtype::F16 => Some(ElementType::F16),
        Dtype::BF16 => Some(ElementType::Bf16),
        _ => None,
    }
}

/// A `model.safetensors.index.json`: which file has which tensor.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct ShardIndex {
    /// The file of each tensor, beside the index.
    pub weight_map: BTreeMap<String, String>,
}

impl ShardIndex {
    /// Reads an index.
    ///
    /// # Errors
    ///
    /// What is wrong with it: no JSON, no `weight_map`, or a file elsewhere than beside it.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        let index: Self = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        let is_beside = |file: &str| {
            !file.is_empty() && !file.contains(['/', '\\', ':', '\0']) && !file.starts_with('.')
        };
        match index.weight_map.iter().find(|(_, file)| !is_beside(file)) {
            None => Ok(index),
            Some((tensor, file)) => Err(format!(
                "{tensor} is said to be in {file:?}, which is no name of a file beside the index"
            )),
        }
    }
}

/// The text of a small file.
pub(super) fn read_text(path: &Path) -> Result<Vec<u8>, CheckpointError> {
    let io = |error| CheckpointError::io("read", path, error);
    let size = fs::metadata(path).map_err(io)?.len();
    if size > LONGEST {
        let what = format!("it has {size} bytes; {LONGEST} are the most that are read");
        return Err(CheckpointError::corrupt(path, what));
    }
    fs::read(path).map_err(io)
}

/// Opens the files of a folder.
pub(super) fn open_shards(folder: &Path) -> Result<(Vec<Shard>, Found), CheckpointError> {
    let single = folder.join(SINGLE);
    if single.exists() {
        let (shard, stored) = Shard::open(&single)?;
        let named = stored.into_iter();
        let named = named.map(|stored| (stored.name.clone(), (0, stored)));
        return Ok((vec![shard], named.collect()));
    }
    let path = folder.join(INDEX);
    if !path.exists() {
        let what = format!("it has neither {SINGLE} nor {INDEX}, and no other weights are read");
        return Err(CheckpointError::corrupt(folder, what));
    }
    let corrupt = |what| CheckpointError::corrupt(&path, what);
    let index = ShardIndex::parse(&read_text(&path)?).map_err(corrupt)?;
    let files: BTreeSet<&String> = index.weight_map.values().collect();
    let (mut shards, mut found) = (vec![], Found::new());
    for file in files {
        let (shard, stored) = Shard::open(&folder.join(file))?;
        for stored in stored {
            if index.weight_map.get(&stored.name) != Some(file) {
                let what = format!("{file} has {}, which is not said to be there", stored.name);
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
            "{name} is said to be in {file}, and is not"
        ))),
    }
}
