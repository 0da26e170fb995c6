//! What lies where in a checkpoint: `manifest.json`.

use std::fmt::Write;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{About, CheckpointError, Checksum, ElementType, Slice, TensorMeta, sealed, validate};

/// The name of its file.
pub const MANIFEST: &str = "manifest.json";
/// What it says that it is.
const FORMAT: &str = "burn-megatron checkpoint";
/// The version of the format that is written and read here.
pub const VERSION: u64 = 1;
/// Why it can always be written.
const HAS_A_FORM: &str = "text, whole numbers and lists of them have a form in JSON";

/// What lies where in a checkpoint.
///
/// Its text is JSON, with a line for each file, tensor and object, and ends with a checksum of all lines
/// above the last two.
#[derive(Clone, Debug, PartialEq)]
pub struct Manifest {
    /// What the checkpoint is of.
    pub about: About,
    /// The files of its data, sorted by name.
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
    /// Its name in the folder of the checkpoint.
    pub name: String,
    /// Its bytes.
    pub size: u64,
    /// The bytes of its header, with those of the header's length; data follows without gaps.
    pub header: u64,
    /// The checksum of the header.
    pub checksum: Checksum,
}

/// A tensor of the whole model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// Its name.
    pub key: String,
    /// The type of its elements.
    pub dtype: ElementType,
    /// Its shape in the whole model.
    pub shape: Vec<usize>,
    /// Where its elements are, each in one piece.
    pub pieces: Vec<PieceEntry>,
}

/// A box of a tensor, in a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PieceEntry {
    /// The number of its file, from 0 on.
    pub file: usize,
    /// Where it begins in the file.
    pub begin: u64,
    /// Which elements of the tensor it has.
    pub slice: Slice,
    /// The checksums of its chunks, 4 MiB each.
    pub checksums: Vec<Checksum>,
}

/// Bytes that are no tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ObjectEntry {
    /// Its name.
    pub key: String,
    /// The number of its file, from 0 on.
    pub file: usize,
    /// Where it begins in the file.
    pub begin: u64,
    /// Its bytes.
    pub size: u64,
    /// The checksums of its chunks, 4 MiB each.
    pub checksums: Vec<Checksum>,
}

/// What every version has.
#[derive(Deserialize)]
struct Head {
    format: String,
    version: u64,
}

/// The members of the JSON.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    #[serde(rename = "format")]
    _format: String,
    #[serde(rename = "version")]
    _version: u64,
    about: About,
    files: Vec<FileEntry>,
    tensors: Vec<TensorEntry>,
    objects: Vec<ObjectEntry>,
    #[serde(rename = "checksum")]
    _checksum: Checksum,
}

impl TensorEntry {
    /// What it is, without where it lies.
    pub fn meta(&self) -> TensorMeta {
        TensorMeta {
            key: self.key.clone(),
            dtype: self.dtype,
            shape: self.shape.clone(),
        }
    }

    /// The name of a piece in its file: the key, with the box if it is not the whole tensor.
    pub fn name_of(&self, slice: &Slice) -> String {
        match slice.shape == self.shape {
            true => self.key.clone(),
            false => format!("{} {slice}", self.key),
        }
    }
}

impl ObjectEntry {
    /// The name in its file.
    pub fn name(key: &str) -> String {
        format!("object/{key}")
    }
}

impl Manifest {
    /// Reads the text of a manifest, and checks that it makes sense: names, sizes, and that each element
    /// of each tensor is in one piece, each byte of each file in one entry.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Corrupt`], [`CheckpointError::Version`], [`CheckpointError::Overlap`],
    /// [`CheckpointError::Gap`], [`CheckpointError::TooLarge`].
    pub fn parse(bytes: &[u8]) -> Result<Self, CheckpointError> {
        Self::parse_of(bytes, Path::new(MANIFEST))
    }

    /// [`Self::parse`], of the file at `path`.
    pub(super) fn parse_of(bytes: &[u8], path: &Path) -> Result<Self, CheckpointError> {
        let corrupt = |what: String| CheckpointError::corrupt(path, what);
        sealed::check(bytes).map_err(corrupt)?;
        let json = |error: serde_json::Error| corrupt(error.to_string());
        let head: Head = serde_json::from_slice(bytes).map_err(json)?;
        if head.format != FORMAT {
            return Err(corrupt(format!(
                "it is a '{}', not a '{FORMAT}'",
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
        let text: Text = serde_json::from_slice(bytes).map_err(json)?;
        let manifest = Self {
            about: text.about,
            files: text.files,
            tensors: text.tensors,
            objects: text.objects,
        };
        validate::check(&manifest, path)?;
        Ok(manifest)
    }

    /// The text that [`Self::parse`] reads.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut text = format!("{{\n\"format\": \"{FORMAT}\",\n\"version\": {VERSION},\n");
        let about = serde_json::to_string_pretty(&self.about).expect(HAS_A_FORM);
        let _ = writeln!(text, "\"about\": {about},");
        lines(&mut text, "files", &self.files);
        lines(&mut text, "tensors", &self.tensors);
        lines(&mut text, "objects", &self.objects);
        sealed::seal(text)
    }
}

/// A list with a line for each item.
fn lines<T: Serialize>(text: &mut String, name: &str, items: &[T]) {
    let line = |item: &T| serde_json::to_string(item).expect(HAS_A_FORM);
    let items: Vec<_> = items.iter().map(line).collect();
    let _ = writeln!(text, "\"{name}\": [\n{}\n],", items.join(",\n"));
}
