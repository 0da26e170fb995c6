//! Exports a model as a folder that `transformers` can load.

use std::collections::BTreeMap;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use burn::tensor::TensorData;
use burn_megatron::checkpoint::{
    CheckpointError, ElementType, HEADER_LENGTH_BYTES, TensorSlice, TensorSource, header_dtype,
};
use burn_megatron::regular_file::is_there;
use serde_json::{Map, Value, json};

use super::folder::CONFIG;
use super::interleave::interleave;
use super::mapping::WeightMapping;
use super::shard::{INDEX, SINGLE, read_text};
use super::staged_folder::StagedFolder;
use super::transpose::transpose_matrices;
use super::{HfConfig, HfError, HfFamily};
use crate::weights::{self, CHUNK};

/// The alignment of the tensor data in a safetensors file, in bytes.
const ALIGNMENT: usize = 8;

/// Files that accompany the weights: tokenizer and generation settings.
const COMPANION_FILES: &[&str] = &[
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
];

/// Options of [`export`].
#[derive(Clone, Debug)]
pub struct ExportOptions {
    /// The dtype of the exported weights; by default the dtype of each tensor in the source.
    pub dtype: Option<ElementType>,
    /// The maximum size of a safetensors file in bytes, without its header. A tensor that is larger than this size is
    /// written to a separate file.
    pub max_shard_size: u64,
    /// Names and contents of additional files, such as tokenizer files: see [`companion_files`].
    pub files: Vec<(String, Vec<u8>)>,
}

impl Default for ExportOptions {
    /// Returns the default options: the weights keep their dtypes, and files have at most 5 GB, as in `transformers` 4.
    fn default() -> Self {
        Self {
            dtype: None,
            max_shard_size: 5_000_000_000,
            files: vec![],
        }
    }
}

/// The result of [`export`]: the numbers of written tensors, bytes and files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportSummary {
    /// The number of written tensors.
    pub tensors: usize,
    /// The total size of the written tensors, in bytes.
    pub bytes: u64,
    /// The number of written safetensors files.
    pub files: usize,
}

/// Reads the companion files of a Hugging Face folder: the tokenizer and the generation settings. Returns their names
/// and contents.
///
/// # Errors
///
/// [`CheckpointError`] if reading fails.
pub fn companion_files(folder: &Path) -> Result<Vec<(String, Vec<u8>)>, CheckpointError> {
    let there = COMPANION_FILES
        .iter()
        .map(|name| (*name, folder.join(name)))
        .filter(|(_, path)| is_there(path));
    let read = |(name, path): (&str, PathBuf)| Ok((name.to_string(), read_text(&path)?));
    there.map(read).collect()
}

/// Exports the model in `source` as a Hugging Face folder that `transformers` can load. The folder contains
/// `config.json` and one or more safetensors files with an index. `progress` receives the number of tensor bytes
/// written since its last call.
///
/// At most 64 MiB of a tensor is in memory at a time, or one row if a row is larger. The files are first written to a
/// temporary folder next to `to`, which is renamed to `to` when it is complete. Tensors of the source that are not
/// weights, such as optimizer state, are not exported.
///
/// # Errors
///
/// [`HfError`] if `to` already exists, if the family cannot describe the model, if a tensor is missing, unexpected or
/// has another shape, or if reading or writing fails.
pub fn export<F: HfFamily>(
    source: &dyn TensorSource,
    config: &HfConfig<F>,
    to: &Path,
    options: &ExportOptions,
    progress: &mut dyn FnMut(u64),
) -> Result<ExportSummary, HfError> {
    StagedFolder::check_free(to)?;
    let refused = |source| HfError::Config {
        path: to.join(CONFIG),
        source,
    };
    config.check().map_err(refused)?;
    let mut parts = config.family.tensors(&config.model);
    check(source, &parts)?;
    for (name, original) in config.family.copies(&config.model) {
        let original = parts.iter().find(|part| part.name == original).cloned();
        parts.extend(original.map(|original| WeightMapping { name, ..original }));
    }
    let tensors = plan(source, parts, options);
    let mut config = config.clone();
    config.dtype = tensors.first().map(|tensor| tensor.to);
    let text = config.to_json().map_err(refused)?;
    let staged = StagedFolder::new(to)?;
    for (name, bytes) in &options.files {
        if !COMPANION_FILES.contains(&&name[..]) {
            let what = format!(
                "invalid companion file {name}: expected one of {}",
                COMPANION_FILES.join(", ")
            );
            return Err(CheckpointError::corrupt(to, what).into());
        }
        staged.write(name, bytes)?;
    }
    staged.write(CONFIG, text.as_bytes())?;
    let shards = shards(&tensors, options.max_shard_size);
    let mut weight_map = Map::new();
    for (number, shard) in shards.iter().enumerate() {
        let name = match shards.len() {
            1 => SINGLE.to_string(),
            count => format!("model-{:05}-of-{count:05}.safetensors", number + 1),
        };
        write_shard(&staged, &name, shard, source, progress)?;
        weight_map.extend(shard.iter().map(|of| (of.mapped.name.clone(), json!(name))));
    }
    let bytes = tensors.iter().map(PlannedTensor::bytes).sum();
    if shards.len() > 1 {
        let metadata = json!({ "total_size": bytes });
        let index = json!({ "metadata": metadata, "weight_map": weight_map });
        staged.write(INDEX, format!("{index:#}\n").as_bytes())?;
    }
    staged.publish()?;
    Ok(ExportSummary {
        tensors: tensors.len(),
        bytes,
        files: shards.len(),
    })
}

/// Checks that the source contains all weights of the model, and no other weights.
fn check(source: &dyn TensorSource, parts: &[WeightMapping]) -> Result<(), CheckpointError> {
    let mut shapes = BTreeMap::<_, Vec<usize>>::new();
    for part in parts {
        part.extend(shapes.entry(part.key.clone()).or_default());
    }
    weights::check(source, &shapes)
}

/// A tensor to be written.
pub(super) struct PlannedTensor {
    mapped: WeightMapping,
    from: ElementType,
    to: ElementType,
}

impl PlannedTensor {
    fn len(&self) -> usize {
        self.mapped.shape.iter().product()
    }

    pub fn bytes(&self) -> u64 {
        (self.len() * self.to.size()) as u64
    }

    /// Reads a slice of the tensor, and converts it to the dtype and layout of the file.
    fn read(
        &self,
        source: &dyn TensorSource,
        slice: &TensorSlice,
    ) -> Result<Vec<u8>, CheckpointError> {
        let (mapped, size) = (&self.mapped, self.from.size());
        let mut bytes = source.read(&mapped.key, slice)?;
        if mapped.interleaved {
            let width = slice.shape[slice.shape.len() - 1];
            bytes = interleave(&bytes, width / 2, size);
        }
        if mapped.transposed {
            bytes = transpose_matrices(&bytes, &slice.shape, size);
        }
        if self.from == self.to {
            return Ok(bytes);
        }
        let data = TensorData::from_bytes_vec(bytes, [slice.len()], self.from.dtype());
        let converted = data.clone().convert_dtype(self.to.dtype());
        let infinite = |data: &TensorData| data.iter::<f64>().filter(|x| x.is_infinite()).count();
        if infinite(&data) != infinite(&converted) {
            let name = &mapped.name;
            let what = format!("{name} has elements that overflow {:?}", self.to);
            return Err(CheckpointError::corrupt(source.name(), what));
        }
        Ok(converted.bytes().to_vec())
    }
}

pub(super) fn plan(
    source: &dyn TensorSource,
    parts: Vec<WeightMapping>,
    options: &ExportOptions,
) -> Vec<PlannedTensor> {
    let planned = parts.into_iter().filter_map(|mapped| {
        let from = source.tensor(&mapped.key)?.dtype;
        let to = options.dtype.filter(|_| !mapped.keeps_type).unwrap_or(from);
        Some(PlannedTensor { mapped, from, to })
    });
    planned.collect()
}

/// Groups tensors into files, in order.
fn shards(tensors: &[PlannedTensor], most: u64) -> Vec<&[PlannedTensor]> {
    let (mut shards, mut first, mut size) = (vec![], 0, 0);
    for (number, tensor) in tensors.iter().enumerate() {
        if number > first && size + tensor.bytes() > most {
            shards.push(&tensors[first..number]);
            (first, size) = (number, 0);
        }
        size += tensor.bytes();
    }
    shards.push(&tensors[first..]);
    shards
}

/// Writes a safetensors file, slice by slice.
pub(super) fn write_shard(
    staged: &StagedFolder,
    name: &str,
    tensors: &[PlannedTensor],
    source: &dyn TensorSource,
    progress: &mut dyn FnMut(u64),
) -> Result<(), CheckpointError> {
    let (file, path) = staged.create(name)?;
    let io = |error| CheckpointError::io("write", &path, error);
    let mut file = BufWriter::new(file);
    file.write_all(&header(tensors)).map_err(io)?;
    for tensor in tensors {
        let size = tensor.from.size().max(tensor.to.size());
        for slice in tensor.mapped.slices(size, CHUNK) {
            let bytes = tensor.read(source, &slice)?;
            file.write_all(&bytes).map_err(io)?;
            progress(bytes.len() as u64);
        }
    }
    let file = file.into_inner().map_err(|error| io(error.into_error()))?;
    file.sync_all().map_err(io)
}

/// Returns the header of a safetensors file, including the length prefix.
fn header(tensors: &[PlannedTensor]) -> Vec<u8> {
    let mut entries = Map::new();
    // `transformers` 4 requires this metadata.
    entries.insert("__metadata__".into(), json!({ "format": "pt" }));
    let mut at = 0;
    for tensor in tensors {
        let end = at + tensor.bytes();
        let entry = json!({
            "dtype": header_dtype(tensor.to).to_string(),
            "shape": tensor.mapped.shape,
            "data_offsets": [at, end],
        });
        entries.insert(tensor.mapped.name.clone(), entry);
        at = end;
    }
    let mut text = Value::Object(entries).to_string();
    let total = (HEADER_LENGTH_BYTES + text.len()).next_multiple_of(ALIGNMENT);
    text.extend(std::iter::repeat_n(
        ' ',
        total - HEADER_LENGTH_BYTES - text.len(),
    ));
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}
