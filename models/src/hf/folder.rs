//! A Hugging Face folder as a source of tensors.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use burn_megatron::checkpoint::{CheckpointError, TensorMeta, TensorSlice, TensorSource};
use burn_megatron::model::ModelConfig;
use burn_megatron::regular_file::is_there;
use serde_json::{Map, Value};

use super::config::unknown_type;
use super::interleave::every_second;
use super::mapping::{WeightMapping, swap_last_two};
use super::shard::{ShardFile, StoredTensors, open_shards, read_text};
use super::stored::{Finder, StoredValues, names};
use super::transpose::transpose_matrices;
use super::{HfConfig, HfConfigError, HfError, HfFamily, HfNames, ModelFamily};

/// The name of the configuration file.
pub(super) const CONFIG: &str = "config.json";

/// The number of bytes of two tensors that are read and compared at once.
const COMPARED: usize = 1 << 20;

/// A Hugging Face folder, which contains a `config.json` and the weights in one safetensors file, or in several files
/// with an index.
///
/// The folder is a [`TensorSource`] of the parameters of the [model](HfConfig::model), in the dtypes of the files. FP8
/// and MXFP4 weights are converted to bf16. Opening the folder reads only the headers of the files. Reading a tensor
/// reads only the requested ranges.
#[derive(Debug)]
pub struct HfFolder<F: HfFamily = ModelFamily> {
    path: PathBuf,
    config: HfConfig<F>,
    shards: Vec<ShardFile>,
    tensors: BTreeMap<String, MappedTensor>,
    left_out: Option<String>,
}

/// A parameter of the model, with the tensors that fill it.
#[derive(Debug)]
struct MappedTensor {
    meta: TensorMeta,
    parts: Vec<TensorPart>,
}

/// A part of a parameter of the model. It is a tensor of a file, or one of the two halves that the tensor interleaves.
#[derive(Debug)]
struct TensorPart {
    stored: StoredValues,
    transposed: bool,
    /// Selects the elements at even (0) or odd (1) indices of the tensor along the last dimension of the parameter.
    /// `None` selects all elements.
    phase: Option<usize>,
    /// The number of dimensions of the tensor.
    dims: usize,
    /// The slice of the parameter that this part fills.
    own: TensorSlice,
}

impl HfFolder {
    /// Opens a Hugging Face folder of a [`ModelFamily`].
    ///
    /// # Errors
    ///
    /// See [`open_family`](Self::open_family).
    pub fn open(path: impl AsRef<Path>) -> Result<Self, HfError> {
        Self::open_family(path)
    }
}

impl<F: HfFamily> HfFolder<F> {
    /// Opens a Hugging Face folder of the families `F`.
    ///
    /// # Errors
    ///
    /// [`HfError`] for an unsupported `config.json`, a missing file, a file that contradicts its header or the index,
    /// or an unsupported dtype. [`HfError`] is also returned if a tensor is missing, unexpected or has another shape.
    pub fn open_family(path: impl AsRef<Path>) -> Result<Self, HfError> {
        let path = path.as_ref();
        let config = HfConfig::read(path)?;
        let (shards, found) = open_shards(path)?;
        Ok(Self::of_tensors(path, config, shards, found)?)
    }

    /// Creates the folder from its configuration and the tensors that its files contain.
    pub(super) fn of_tensors(
        path: &Path,
        config: HfConfig<F>,
        shards: Vec<ShardFile>,
        mut found: StoredTensors,
    ) -> Result<Self, CheckpointError> {
        let mut folder = Self {
            path: path.to_path_buf(),
            config,
            shards,
            tensors: BTreeMap::new(),
            left_out: None,
        };
        let buffers = folder.config.family.names().buffers;
        found.retain(|name, _| !buffers.iter().any(|buffer| name.ends_with(buffer)));
        folder.put_prefix(&mut found);
        folder.leave_out_missing(&found);
        folder.check_copies(&mut found)?;
        folder.assign(found)?;
        Ok(folder)
    }

    /// Returns a message for the user if the files do not contain the tensors of a part of the model that `config.json`
    /// describes.
    pub fn left_out(&self) -> Option<&str> {
        self.left_out.as_deref()
    }

    /// Removes a part of the model whose tensors are not in the files.
    fn leave_out_missing(&mut self, found: &StoredTensors) {
        let HfConfig { family, model, .. } = &self.config;
        let missing = family.without_missing(model, &|name| found.contains_key(name));
        if let Some((model, what)) = missing {
            self.config.model = model;
            self.left_out = Some(format!(
                "without {what}, because the files have none of its tensors"
            ));
        }
    }

    /// Checks that copies of tensors equal the originals, and removes the copies from the found tensors.
    fn check_copies(&self, found: &mut StoredTensors) -> Result<(), CheckpointError> {
        let config = &self.config;
        for (copy, original) in config.family.copies(&config.model) {
            self.check_copy(found, &copy, original, "both are one tensor of the model")?;
        }
        Ok(())
    }

    /// Returns the parsed `config.json`.
    pub fn config(&self) -> &HfConfig<F> {
        &self.config
    }

    /// Returns the path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the number of tensor bytes that were read from the files so far.
    pub fn bytes_read(&self) -> u64 {
        self.shards.iter().map(ShardFile::bytes_read).sum()
    }

    /// Adds the prefix to the names of tensors if the files contain only the decoder, whose names have no prefix.
    fn put_prefix(&self, found: &mut StoredTensors) {
        let HfNames { prefix, output, .. } = self.config.family.names();
        if found.keys().any(|name| name.starts_with(prefix)) {
            return;
        }
        let named = std::mem::take(found).into_iter().map(|(name, at)| {
            let name = if name == output {
                name
            } else {
                format!("{prefix}{name}")
            };
            (name, at)
        });
        *found = named.collect();
    }

    /// Assigns the tensors of the files to the parameters of the model.
    fn assign(&mut self, mut found: StoredTensors) -> Result<(), CheckpointError> {
        let (family, model) = (self.config.family, &self.config.model);
        // Limits the number of layers before a list of this length is allocated.
        if model.layers() > found.len() {
            let what = format!(
                "config.json gives {} layers, but the files have only {} tensors",
                model.layers(),
                found.len()
            );
            return Err(CheckpointError::corrupt(self.path.join(CONFIG), what));
        }
        let mapped = family.stored_tensors(model, &|name| found.contains_key(name));
        if mapped.iter().all(|part| part.name != family.names().output) {
            self.check_tied_output(&mut found)?;
        }
        let missing: Vec<_> = mapped
            .iter()
            .flat_map(names)
            .filter(|name| !found.contains_key(name))
            .collect();
        if !missing.is_empty() {
            return Err(CheckpointError::Missing {
                of: self.name(),
                keys: missing,
            });
        }
        for part in mapped {
            let finder = Finder {
                of: self.name(),
                shards: &self.shards,
                found: &found,
            };
            let stored = finder.values(&part)?;
            for name in stored.names(&part) {
                found.remove(&name);
            }
            self.add(part, stored)?;
        }
        if found.is_empty() {
            Ok(())
        } else {
            Err(CheckpointError::Unexpected {
                of: self.name(),
                keys: found.into_keys().collect(),
            })
        }
    }

    fn add(&mut self, part: WeightMapping, stored: StoredValues) -> Result<(), CheckpointError> {
        let dtype = stored.dtype;
        let own = self
            .tensors
            .entry(part.key.clone())
            .or_insert_with(|| MappedTensor {
                meta: TensorMeta {
                    key: part.key.clone(),
                    dtype,
                    shape: vec![],
                },
                parts: vec![],
            });
        if own.meta.dtype != dtype {
            let what = format!(
                "{} has elements of {dtype}, but the other parts of {} have {}: expected equal types",
                part.name, own.meta.key, own.meta.dtype
            );
            let path = self.shards[stored.shard()].path();
            return Err(CheckpointError::corrupt(path, what));
        }
        part.extend(&mut own.meta.shape);
        let of_part = |phase, own| TensorPart {
            stored: stored.clone(),
            transposed: part.transposed,
            phase,
            dims: part.shape.len(),
            own,
        };
        match part.halves() {
            None => own.parts.push(of_part(None, part.own())),
            Some(halves) => {
                let halves = halves.into_iter().enumerate();
                let halves = halves.map(|(phase, half)| of_part(Some(phase), half));
                own.parts.extend(halves);
            }
        }
        Ok(())
    }

    /// Removes the output weight from the found tensors if the output layer of the model is tied. Checks that it equals
    /// the embedding.
    fn check_tied_output(&self, found: &mut StoredTensors) -> Result<(), CheckpointError> {
        let names = self.config.family.names();
        let why = "tie_word_embeddings is true; set tie_word_embeddings = false to read both";
        self.check_copy(found, names.output, names.embedding, why)
    }

    /// Removes a copy of a tensor from the found tensors, if it is there. Checks that it equals the original.
    fn check_copy(
        &self,
        found: &mut StoredTensors,
        copy: &str,
        original: &str,
        why: &str,
    ) -> Result<(), CheckpointError> {
        let Some((shard, copy)) = found.remove(copy) else {
            return Ok(());
        };
        let Some((other, original)) = found.get(original) else {
            return Ok(());
        };
        let differs = || {
            let what = format!(
                "{} differs from {}, although {why}",
                copy.name, original.name
            );
            CheckpointError::corrupt(self.shards[shard].path(), what)
        };
        if (&copy.shape, copy.dtype) != (&original.shape, original.dtype) {
            return Err(differs());
        }
        let (mut left, mut at) = (copy.size, 0);
        let (mut a, mut b) = (vec![0; COMPARED], vec![0; COMPARED]);
        while left > 0 {
            let now = left.min(COMPARED as u64) as usize;
            self.shards[shard].read(&mut a[..now], copy.begin + at)?;
            self.shards[*other].read(&mut b[..now], original.begin + at)?;
            if a[..now] != b[..now] {
                return Err(differs());
            }
            (left, at) = (left - now as u64, at + now as u64);
        }
        Ok(())
    }

    /// Reads a slice of a part. The slice and the result have the layout of the parameter.
    fn read_part(
        &self,
        part: &TensorPart,
        slice: &TensorSlice,
        size: usize,
    ) -> Result<Vec<u8>, CheckpointError> {
        // The tensor of a single expert does not have the first dimension, whose size is 1.
        let first = slice.shape.len() - part.dims;
        let mut stored = TensorSlice {
            offset: slice.offset[first..].to_vec(),
            shape: slice.shape[first..].to_vec(),
        };
        let last = part.dims - 1;
        if part.phase.is_some() {
            // Elements are read in pairs, and one element of each pair is kept.
            stored.offset[last] *= 2;
            stored.shape[last] *= 2;
        }
        if part.transposed {
            swap_last_two(&mut stored.offset);
            swap_last_two(&mut stored.shape);
        }
        let mut bytes = part.stored.read(&self.shards, &stored)?;
        if part.transposed {
            bytes = transpose_matrices(&bytes, &stored.shape, size);
        }
        Ok(match part.phase {
            Some(phase) => every_second(&bytes, phase, size),
            None => bytes,
        })
    }
}

impl<F: HfFamily> TensorSource for HfFolder<F> {
    fn name(&self) -> String {
        self.path.display().to_string()
    }

    fn keys(&self) -> Vec<String> {
        self.tensors.keys().cloned().collect()
    }

    fn tensor(&self, key: &str) -> Option<TensorMeta> {
        Some(self.tensors.get(key)?.meta.clone())
    }

    fn read(&self, key: &str, slice: &TensorSlice) -> Result<Vec<u8>, CheckpointError> {
        let Some(MappedTensor { meta, parts }) = self.tensors.get(key) else {
            return Err(CheckpointError::missing(self.name(), key));
        };
        CheckpointError::check_bounds(key, &meta.shape, slice)?;
        let size = meta.dtype.size();
        let mut bytes = vec![0; slice.len() * size];
        for part in parts {
            let Some(both) = part.own.intersection(slice) else {
                continue;
            };
            let read = self.read_part(part, &both.within(&part.own), size)?;
            if both == *slice {
                return Ok(read);
            }
            for run in both.within(slice).runs(&slice.shape) {
                let (from, to) = (run.in_slice * size, run.in_tensor * size);
                let len = run.len * size;
                bytes[to..to + len].copy_from_slice(&read[from..from + len]);
            }
        }
        Ok(bytes)
    }
}

/// Returns the `model_type` of a Hugging Face folder, which must be one of `known`.
///
/// # Errors
///
/// [`HfError`] if the `config.json` cannot be read or is not a JSON object, or if the `model_type` is not in `known`.
pub fn model_type<'a>(folder: &Path, known: &[&'a str]) -> Result<&'a str, HfError> {
    let path = folder.join(CONFIG);
    let config: Result<Map<String, Value>, _> = serde_json::from_slice(&read_text(&path)?);
    let found = config.map_err(HfConfigError::Json).and_then(|config| {
        let found = config.get("model_type");
        let known_one = known
            .iter()
            .find(|known| found == Some(&Value::from(**known)));
        known_one.copied().ok_or_else(|| unknown_type(found, known))
    });
    found.map_err(|source| HfError::Config { path, source })
}

/// Returns whether a folder is a Hugging Face folder: it contains a `config.json`.
pub fn is_hf_folder(path: &Path) -> bool {
    is_there(&path.join(CONFIG))
}
