//! `manifest.json`, which lists the file of each slice of each tensor of a checkpoint.

use std::fmt::Write;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::header::{self, HeaderEntry};
use super::{
    CheckpointError, CheckpointMetadata, Checksum, ElementType, TensorMeta, TensorSlice,
    checksummed, validate,
};

/// The name of the manifest file.
pub const MANIFEST: &str = "manifest.json";
/// The value of the `format` member.
const FORMAT: &str = "burn-megatron checkpoint";
/// The version of the format that this library writes and reads.
pub const VERSION: u64 = 1;
/// The reason why serialization cannot fail.
const HAS_A_FORM: &str = "strings, integers and lists of them serialize to JSON";

/// The manifest of a checkpoint, which lists the file of each slice of each tensor.
///
/// It is serialized as JSON with one line per file, tensor and object. The last member is a checksum of all
/// previous lines.
#[derive(Clone, Debug, PartialEq)]
pub struct Manifest {
    /// The metadata of the checkpoint: the step, the number of samples, the layout, the recipe and the state of the
    /// run.
    pub metadata: CheckpointMetadata,
    /// The data files, sorted by name.
    pub files: Vec<FileEntry>,
    /// The tensors, sorted by key.
    pub tensors: Vec<TensorEntry>,
    /// The objects, sorted by key.
    pub objects: Vec<ObjectEntry>,
}

/// A safetensors file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// The name of the file in the folder of the checkpoint.
    pub name: String,
    /// The size in bytes.
    pub size: u64,
    /// The size of the file's header in bytes, including the length prefix. The data follows the header without gaps.
    pub header: u64,
    /// The checksum of the header.
    pub checksum: Checksum,
}

/// A tensor of the complete model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// The key.
    pub key: String,
    /// The element type.
    pub dtype: ElementType,
    /// The shape of the tensor in the complete model.
    pub shape: Vec<usize>,
    /// The shards of the tensor. Each element is in exactly one shard.
    #[serde(rename = "pieces")]
    pub shards: Vec<ShardEntry>,
}

/// A shard: a slice of a tensor that is stored in a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardEntry {
    /// The index of the data file in [`Manifest::files`].
    pub file: usize,
    /// The offset of the data in the file, in bytes.
    pub begin: u64,
    /// The slice of the tensor in this shard.
    pub slice: TensorSlice,
    /// The checksums of the data, one for each chunk of 4 MiB.
    pub checksums: Vec<Checksum>,
}

/// An object: bytes with a name, such as the scales of an FP8 layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ObjectEntry {
    /// The key.
    pub key: String,
    /// The index of the data file in [`Manifest::files`].
    pub file: usize,
    /// The offset of the data in the file, in bytes.
    pub begin: u64,
    /// The size in bytes.
    pub size: u64,
    /// The checksums of the data, one for each chunk of 4 MiB.
    pub checksums: Vec<Checksum>,
}

/// The members that all versions of the format have.
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
    /// Returns the key, element type and shape of the tensor.
    pub fn meta(&self) -> TensorMeta {
        TensorMeta {
            key: self.key.clone(),
            dtype: self.dtype,
            shape: self.shape.clone(),
        }
    }

    /// Returns the name of a shard in its data file. The name is the key of the tensor. The slice is appended to the
    /// key unless the shard is the complete tensor.
    pub fn name_of(&self, slice: &TensorSlice) -> String {
        if slice.shape == self.shape {
            self.key.clone()
        } else {
            format!("{} {slice}", self.key)
        }
    }

    /// Returns the entry of a shard in the header of its file.
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
    /// Returns the name of the object with this key in its data file.
    pub fn name(key: &str) -> String {
        format!("object/{key}")
    }

    /// Returns the entry of an object in the header of its file.
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
    /// Parses and validates a manifest. It checks names and sizes. Each element of a tensor must be in exactly one
    /// shard. Each byte of a file's data must be in exactly one entry.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Version`] for an unsupported version; [`CheckpointError::Overlap`],
    /// [`CheckpointError::Gap`] and [`CheckpointError::TooLarge`] for invalid tensors;
    /// [`CheckpointError::Corrupt`] for other invalid content.
    pub fn parse(bytes: &[u8]) -> Result<Self, CheckpointError> {
        Self::parse_of(bytes, Path::new(MANIFEST))
    }

    /// Parses and validates the manifest at `path`, as [`Self::parse`] does.
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

    /// Serializes the manifest to the bytes that [`Self::parse`] reads.
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

/// Writes a list with one line per item.
fn lines<T: Serialize>(text: &mut String, name: &str, items: &[T]) {
    let line = |item: &T| serde_json::to_string(item).expect(HAS_A_FORM);
    let items: Vec<_> = items.iter().map(line).collect();
    let _ = writeln!(text, "\"{name}\": [\n{}\n],", items.join(",\n"));
}
