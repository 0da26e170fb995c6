//! Writing a folder that `transformers` loads.

use std::collections::BTreeSet;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use burn::tensor::TensorData;
use burn_megatron::checkpoint::{
    CheckpointError, ElementType, HEADER_LENGTH, MODEL, Slice, TensorSource, header_dtype,
};
use serde_json::{Map, Value, json};

use super::draft::Draft;
use super::folder::CONFIG;
use super::names::{CHUNK, Mapped, mapped};
use super::shard::{INDEX, SINGLE, read_text};
use super::transpose::transpose;
use super::{HfConfig, HfError};

/// The data of a file begins at a multiple of this.
const ALIGNMENT: usize = 8;

/// Files beside the weights that go with a model: those of tokenizers, and how it generates.
const COMPANIONS: &[&str] = &[
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

/// How a folder is written.
#[derive(Clone, Debug)]
pub struct ExportOptions {
    /// The type of its elements; each as in the source where not given.
    pub dtype: Option<ElementType>,
    /// The most bytes of tensors in a file, unless one alone is larger.
    pub max_shard_size: u64,
    /// Names and contents of more files, such as those of a tokenizer; see [`companions`].
    pub files: Vec<(String, Vec<u8>)>,
}

impl Default for ExportOptions {
    /// Types as they are, and files of 5 GB, as `transformers` 4 had them.
    fn default() -> Self {
        Self {
            dtype: None,
            max_shard_size: 5_000_000_000,
            files: vec![],
        }
    }
}

/// What was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exported {
    /// Tensors.
    pub tensors: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Files with tensors.
    pub files: usize,
}

/// The files of a folder that go with its weights: tokenizer and generation settings.
///
/// # Errors
///
/// [`CheckpointError`] for one that cannot be read.
pub fn companions(folder: &Path) -> Result<Vec<(String, Vec<u8>)>, CheckpointError> {
    let there = COMPANIONS.iter().map(|name| (*name, folder.join(name)));
    let there = there.filter(|(_, path)| path.is_file());
    let read = |(name, path): (&str, PathBuf)| Ok((name.to_string(), read_text(&path)?));
    there.map(read).collect()
}

/// Writes the model of `source` as a folder that `transformers` loads: `config.json`, and one
/// safetensors file or several with an index. `progress` gets the bytes of tensors as they are written.
///
/// At most 64 MiB of a tensor, or one row of a larger one, are in memory. The folder is made under another name beside `to`, and gets
/// its own when all is on the disk. Tensors of the source that are not of the model, such as the state of
/// an optimizer, are left out.
///
/// # Errors
///
/// [`HfError`] where `to` is there already, for a model that the family has not, tensors that are
/// missing, too many or of another shape, and what cannot be read or written.
pub fn export(
    source: &dyn TensorSource,
    config: &HfConfig,
    to: &Path,
    options: &ExportOptions,
    progress: &mut dyn FnMut(u64),
) -> Result<Exported, HfError> {
    if to.exists() {
        let there = std::io::ErrorKind::AlreadyExists.into();
        return Err(CheckpointError::io("write", to, there).into());
    }
    let refused = |source| HfError::Config {
        path: to.join(CONFIG),
        source,
    };
    config.check().map_err(refused)?;
    let parts = mapped(config.family, &config.model);
    check(source, &parts)?;
    let tensors = plan(source, parts, options);
    let mut config = config.clone();
    config.dtype = tensors.first().map(|tensor| tensor.to);
    let text = config.to_json().map_err(refused)?;
    let draft = Draft::new(to)?;
    for (name, bytes) in &options.files {
        if !COMPANIONS.contains(&&name[..]) {
            let what = format!(
                "{name} is no file that goes with a model: {}",
                COMPANIONS.join(", ")
            );
            return Err(CheckpointError::corrupt(to, what).into());
        }
        draft.write(name, bytes)?;
    }
    draft.write(CONFIG, text.as_bytes())?;
    let shards = shards(&tensors, options.max_shard_size);
    let mut weight_map = Map::new();
    for (number, shard) in shards.iter().enumerate() {
        let name = match shards.len() {
            1 => SINGLE.to_string(),
            count => format!("model-{:05}-of-{count:05}.safetensors", number + 1),
        };
        write_shard(&draft, &name, shard, source, progress)?;
        weight_map.extend(shard.iter().map(|of| (of.mapped.name.clone(), json!(name))));
    }
    let bytes = tensors.iter().map(Planned::bytes).sum();
    if shards.len() > 1 {
        let metadata = json!({ "total_size": bytes });
        let index = json!({ "metadata": metadata, "weight_map": weight_map });
        draft.write(INDEX, format!("{index:#}\n").as_bytes())?;
    }
    draft.publish()?;
    Ok(Exported {
        tensors: tensors.len(),
        bytes,
        files: shards.len(),
    })
}

/// Checks that the source has the tensors of the model, and no others of a model.
fn check(source: &dyn TensorSource, parts: &[Mapped]) -> Result<(), CheckpointError> {
    let mut shapes = std::collections::BTreeMap::new();
    for part in parts {
        let shape = part.own_shape();
        let end = part.at + shape.last().copied().unwrap_or_default();
        let own = shapes.entry(&part.key).or_insert(shape);
        if let Some(last) = own.last_mut() {
            *last = end;
        }
    }
    let of = source.name();
    let mut missing = vec![];
    for (key, wanted) in &shapes {
        match source.tensor(key) {
            None => missing.push(key.to_string()),
            Some(meta) if meta.shape != *wanted => {
                return Err(CheckpointError::Shape {
                    of,
                    key: key.to_string(),
                    found: meta.shape,
                    wanted: wanted.clone(),
                });
            }
            Some(_) => {}
        }
    }
    if !missing.is_empty() {
        return Err(CheckpointError::Missing { of, keys: missing });
    }
    let known: BTreeSet<_> = shapes.into_keys().collect();
    let keys = source.keys().into_iter();
    let keys: Vec<_> = keys
        .filter(|key| key.starts_with(MODEL) && !known.contains(key))
        .collect();
    match keys.is_empty() {
        true => Ok(()),
        false => Err(CheckpointError::Unexpected { of, keys }),
    }
}

/// A tensor that is to be written.
struct Planned {
    mapped: Mapped,
    from: ElementType,
    to: ElementType,
}

impl Planned {
    fn len(&self) -> usize {
        self.mapped.shape.iter().product()
    }

    fn bytes(&self) -> u64 {
        (self.len() * self.to.size()) as u64
    }

    /// A box as it is written.
    fn read(&self, source: &dyn TensorSource, slice: &Slice) -> Result<Vec<u8>, CheckpointError> {
        let Mapped {
            name,
            key,
            transposed,
            ..
        } = &self.mapped;
        let bytes = source.read(key, slice)?;
        let bytes = match transposed {
            true => transpose(&bytes, slice.shape[0], slice.shape[1], self.from.size()),
            false => bytes,
        };
        if self.from == self.to {
            return Ok(bytes);
        }
        let data = TensorData::from_bytes_vec(bytes, [slice.len()], self.from.dtype());
        let converted = data.clone().convert_dtype(self.to.dtype());
        let infinite = |data: &TensorData| data.iter::<f64>().filter(|x| x.is_infinite()).count();
        if infinite(&data) != infinite(&converted) {
            let what = format!("{name} has elements that are too large for {:?}", self.to);
            return Err(CheckpointError::corrupt(source.name(), what));
        }
        Ok(converted.bytes().to_vec())
    }
}

fn plan(source: &dyn TensorSource, parts: Vec<Mapped>, options: &ExportOptions) -> Vec<Planned> {
    let planned = parts.into_iter().filter_map(|mapped| {
        let from = source.tensor(&mapped.key)?.dtype;
        let to = options.dtype.unwrap_or(from);
        Some(Planned { mapped, from, to })
    });
    planned.collect()
}

/// Tensors by files, in their order.
fn shards(tensors: &[Planned], most: u64) -> Vec<&[Planned]> {
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

/// A file of tensors, box after box.
fn write_shard(
    draft: &Draft,
    name: &str,
    tensors: &[Planned],
    source: &dyn TensorSource,
    progress: &mut dyn FnMut(u64),
) -> Result<(), CheckpointError> {
    let (file, path) = draft.create(name)?;
    let io = |error| CheckpointError::io("write", &path, error);
    let mut file = BufWriter::new(file);
    file.write_all(&header(tensors)).map_err(io)?;
    for tensor in tensors {
        let size = tensor.from.size().max(tensor.to.size());
        for slice in tensor.mapped.boxes(size, CHUNK) {
            let bytes = tensor.read(source, &slice)?;
            file.write_all(&bytes).map_err(io)?;
            progress(bytes.len() as u64);
        }
    }
    let file = file.into_inner().map_err(|error| io(error.into_error()))?;
    file.sync_all().map_err(io)
}

/// The header of a file, with its length.
fn header(tensors: &[Planned]) -> Vec<u8> {
    let mut entries = Map::new();
    // Without it `transformers` 4 does not load the file.
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
    let total = (HEADER_LENGTH + text.len()).next_multiple_of(ALIGNMENT);
    text.extend(std::iter::repeat_n(' ', total - HEADER_LENGTH - text.len()));
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}
