//! `manifest.json`: which slice of which tensor is in which file of a checkpoint.

use std::fmt::Write;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::header::{self, HeaderEntry};
use super::{
    CheckpointError, CheckpointMetadata, Checksum, ElementType, TensorMeta, TensorSlice,
    checksummed, validate,
};

/// The name of the manifest's file.
pub const MANIFEST: &str = "manifest.json";
/// The value of its `format`.
const FORMAT: &str = "burn-megatron checkpoint";
/// The version of the format that this library writes and reads.
pub const VERSION: u64 = 1;
/// Why serialization cannot fail.
const HAS_A_FORM: &str = "strings, integers and lists of them serialize to JSON";

/// Which slice of which tensor is in which file of a checkpoint.
///
/// Serialized as JSON with one line per file, tensor and object; its last member is a checksum of all lines
/// before it.
#[derive(Clone, Debug, PartialEq)]
pub struct Manifest {
    /// Step, samples, layout, recipe and state of the run.
    pub metadata: CheckpointMetadata,
    /// The data files, sorted by name.
    pub files: Vec<FileEntry>,
    /// The tensors, sorted by key.
    pub tensors: Vec<TensorEntry>,
    /// The objects, sorted by key.
    pub objects: Vec<ObjectEntry>,
}

/// A safetensors file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Its name in the checkpoint's folder.
    pub name: String,
    /// Its size in bytes.
    pub size: u64,
    /// The size of its header in bytes, including the length prefix; the data follows without gaps.
    pub header: u64,
    /// The checksum of the header.
    pub checksum: Checksum,
}

/// A tensor of the whole model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// Its key.
    pub key: String,
    /// The element type.
    pub dtype: ElementType,
    /// Its shape in the whole model.
    pub shape: Vec<usize>,
    /// Its shards; each element is in exactly one of them.
    #[serde(rename = "pieces")]
    pub shards: Vec<ShardEntry>,
}

/// A slice of a tensor in a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardEntry {
    /// The index of its file in [`Manifest::files`].
    pub file: usize,
    /// Its offset in the file, in bytes.
    pub begin: u64,
    /// Which elements of the tensor it holds.
    pub slice: TensorSlice,
    /// One checksum per chunk of 4 MiB.
    pub checksums: Vec<Checksum>,
}

/// A named blob of bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ObjectEntry {
    /// Its key.
    pub key: String,
    /// The index of its file in [`Manifest::files`].
    pub file: usize,
    /// Its offset in the file, in bytes.
    pub begin: u64,
    /// Its size in bytes.
    pub size: u64,
    /// One checksum per chunk of 4 MiB.
    pub checksums: Vec<Checksum>,
}

/// The members that every version of the format has.
#[derive(Deserialize)]
struct ManifestHead {
    format: String,
    version: u64,
}

/// The members of the JSON object.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ManifestJson {
    #[serde(rename = "format")]
    _format: String,
    #[serde(rename = "version")]
    _version: u64,
    #[serde(rename = "about")]
    metadata: CheckpointMetadata,
    files: Vec<FileEntry>,
    tensors: Vec<TensorEntry>,
    objects: Vec<ObjectEntry>,
    #[serde(rename = "checksum")]
    _checksum: Checksum,
}

impl TensorEntry {
    /// Key, element type and shape.
    pub fn meta(&self) -> TensorMeta {
        TensorMeta {
            key: self.key.clone(),
            dtype: self.dtype,
            shape: self.shape.clone(),
        }
    }

    /// The name of a shard in its file: the key, followed by the slice unless it is the whole tensor.
    pub fn name_of(&self, slice: &TensorSlice) -> String {
        if slice.shape == self.shape {
            self.key.clone()
        } else {
            format!("{} {slice}", self.key)
        }
    }

    /// The entry of a shard in the header of its file.
    pub(super) fn header_entry(&self, slice: &TensorSlice, begin: u64) -> HeaderEntry {
        HeaderEntry {
            name: self.name_of(slice),
            dtype: header::dtype(self.dtype),
            shape: slice.shape.clone(),
            begin,
            size: (slice.len() * self.dtype.size()) as u64,
        }
    }
}

impl ObjectEntry {
    /// The name of the object in its file.
    pub fn name(key: &str) -> String {
        format!("object/{key}")
    }

    /// The entry of an object in the header of its file.
    pub(super) fn header_entry(key: &str, begin: u64, size: u64) -> HeaderEntry {
        HeaderEntry {
            name: Self::name(key),
            dtype: safetensors::Dtype::U8,
            shape: vec![size as usize],
            begin,
            size,
        }
    }
}

impl Manifest {
    /// Parses a manifest and validates it: names, sizes, that each element of each tensor is in exactly one
    /// shard, and each byte of each file in exactly one entry.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Corrupt`], [`CheckpointError::Version`], [`CheckpointError::Overlap`],
    /// [`CheckpointError::Gap`], [`CheckpointError::TooLarge`].
    pub fn parse(bytes: &[u8]) -> Result<Self, CheckpointError> {
        Self::parse_of(bytes, Path::new(MANIFEST))
    }

    /// [`Self::parse`] for the file at `path`.
    pub(super) fn parse_of(bytes: &[u8], path: &Path) -> Result<Self, CheckpointError> {
        let corrupt = |what: String| CheckpointError::corrupt(path, what);
        checksummed::check(bytes).map_err(corrupt)?;
        let invalid = |error: serde_json::Error| corrupt(error.to_string());
        let head: ManifestHead = serde_json::from_slice(bytes).map_err(invalid)?;
        if head.format != FORMAT {
            return Err(corrupt(format!(
                "unknown format '{}': expected '{FORMAT}'",
                head.format
            )));
        }
        if head.version != VERSION {
            return Err(CheckpointError::Version {
                path: path.to_path_buf(),
                found: head.version,
                known: VERSION,
            });
        }
        let json: ManifestJson = serde_json::from_slice(bytes).map_err(invalid)?;
        let manifest = Self {
            metadata: json.metadata,
            files: json.files,
            tensors: json.tensors,
            objects: json.objects,
        };
        validate::check(&manifest, path)?;
        Ok(manifest)
    }

    /// The bytes that [`Self::parse`] reads.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut text = format!("{{\n\"format\": \"{FORMAT}\",\n\"version\": {VERSION},\n");
        let metadata = serde_json::to_string_pretty(&self.metadata).expect(HAS_A_FORM);
        let _ = writeln!(text, "\"about\": {metadata},");
        lines(&mut text, "files", &self.files);
        lines(&mut text, "tensors", &self.tensors);
        lines(&mut text, "objects", &self.objects);
        checksummed::append_checksum(text)
    }
}

/// A list with one line per item.
fn lines<T: Serialize>(text: &mut String, name: &str, items: &[T]) {
    let line = |item: &T| serde_json::to_string(item).expect(HAS_A_FORM);
    let items: Vec<_> = items.iter().map(line).collect();
    let _ = writeln!(text, "\"{name}\": [\n{}\n],", items.join(",\n"));
}
