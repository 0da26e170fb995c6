//! A folder of Hugging Face as a source of tensors.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use burn_megatron::checkpoint::{CheckpointError, HeaderEntry, Slice, TensorMeta, TensorSource};

use super::names::{self, Mapped};
use super::shard::{Found, Shard, element_type, open_shards, read_text};
use super::transpose::transpose;
use super::{HfConfig, HfError};

/// The configuration.
pub(super) const CONFIG: &str = "config.json";

/// Bytes of two tensors that are compared at once.
const COMPARED: usize = 1 << 20;

/// A folder with a `config.json` and weights in safetensors, one file or several with an index.
///
/// It gives the tensors of the [`Transformer`](crate::Transformer) of its
/// [`config`](HfConfig::model), in the type of the files. Only headers are read when it is opened; what
/// is read later are the ranges that are asked for.
#[derive(Debug)]
pub struct HfFolder {
    path: PathBuf,
    config: HfConfig,
    shards: Vec<Shard>,
    tensors: BTreeMap<String, Own>,
}

/// One of our tensors.
#[derive(Debug)]
struct Own {
    meta: TensorMeta,
    parts: Vec<Part>,
}

/// A tensor of a file that is a part of one of ours.
#[derive(Debug)]
struct Part {
    shard: usize,
    begin: u64,
    shape: Vec<usize>,
    transposed: bool,
    /// Where it lies in ours.
    own: Slice,
}

impl HfFolder {
    /// Opens a folder.
    ///
    /// # Errors
    ///
    /// [`HfError`] for a `config.json` that is not understood whole, a file that is missing or not what
    /// its header or the index says, tensors that the model has not, lacks or has in another shape, and
    /// types that are not read.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, HfError> {
        let path = path.as_ref();
        let config_path = path.join(CONFIG);
        let bytes = read_text(&config_path)?;
        let config = HfConfig::parse(&bytes).map_err(|source| HfError::Config {
            path: config_path,
            source,
        })?;
        let (shards, mut found) = open_shards(path)?;
        let mut folder = Self {
            path: path.to_path_buf(),
            config,
            shards,
            tensors: BTreeMap::new(),
        };
        found.retain(|name, _| !names::is_no_weight(name));
        folder.put_prefix(&mut found);
        folder.assign(found)?;
        Ok(folder)
    }

    /// What its `config.json` says.
    pub fn config(&self) -> &HfConfig {
        &self.config
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Files of the decoder alone have shorter names.
    fn put_prefix(&self, found: &mut Found) {
        let prefix = names::prefix(self.config.family);
        if found.keys().any(|name| name.starts_with(prefix)) {
            return;
        }
        let named = std::mem::take(found).into_iter().map(|(name, at)| {
            let name = match name == names::OUTPUT {
                true => name,
                false => format!("{prefix}{name}"),
            };
            (name, at)
        });
        *found = named.collect();
    }

    /// Finds the parts of each of our tensors.
    fn assign(&mut self, mut found: Found) -> Result<(), CheckpointError> {
        let model = &self.config.model;
        // More layers than tensors: the number lies, and is not to be counted up to.
        if model.layers > found.len() {
            let what = format!(
                "{} layers are said to be there, and the files have {} tensors",
                model.layers,
                found.len()
            );
            return Err(CheckpointError::corrupt(self.path.join(CONFIG), what));
        }
        self.check_tied_output(&mut found)?;
        let mapped = names::mapped(self.config.family, model);
        let missing = mapped.iter().filter(|part| !found.contains_key(&part.name));
        let missing: Vec<_> = missing.map(|part| part.name.clone()).collect();
        if !missing.is_empty() {
            return Err(CheckpointError::Missing {
                of: self.name(),
                keys: missing,
            });
        }
        for part in mapped {
            if let Some((shard, stored)) = found.remove(&part.name) {
                self.add(part, shard, stored)?;
            }
        }
        match found.is_empty() {
            true => Ok(()),
            false => Err(CheckpointError::Unexpected {
                of: self.name(),
                keys: found.into_keys().collect(),
            }),
        }
    }

    fn add(
        &mut self,
        part: Mapped,
        shard: usize,
        stored: HeaderEntry,
    ) -> Result<(), CheckpointError> {
        if stored.shape != part.shape {
            return Err(CheckpointError::Shape {
                of: self.name(),
                key: part.name,
                found: stored.shape,
                wanted: part.shape,
            });
        }
        let path = self.shards[shard].path();
        let Some(dtype) = element_type(stored.dtype) else {
            let what = format!(
                "{} has elements of {}; F64, F32, F16 and BF16 are read",
                part.name, stored.dtype
            );
            return Err(CheckpointError::corrupt(path, what));
        };
        let mut slice = Slice::whole(&part.own_shape());
        let last = slice.shape.len() - 1;
        slice.offset[last] = part.at;
        let end = part.at + slice.shape[last];
        let own = self.tensors.entry(part.key.clone()).or_insert_with(|| Own {
            meta: TensorMeta {
                key: part.key,
                dtype,
                shape: slice.shape.clone(),
            },
            parts: vec![],
        });
        if own.meta.dtype != dtype {
            let what = format!(
                "{} has elements of {}, and those beside it in {} have {:?}; all must have the same",
                part.name, stored.dtype, own.meta.key, own.meta.dtype
            );
            return Err(CheckpointError::corrupt(path, what));
        }
        own.meta.shape[last] = end;
        own.parts.push(Part {
            shard,
            begin: stored.begin,
            shape: part.shape,
            transposed: part.transposed,
            own: slice,
        });
        Ok(())
    }

    /// Where the output is tied to the embedding, files may have both; then they must be equal, as
    /// versions of `transformers` differ in which one counts.
    fn check_tied_output(&self, found: &mut Found) -> Result<(), CheckpointError> {
        if !self.config.model.tied {
            return Ok(());
        }
        let Some((shard, output)) = found.remove(names::OUTPUT) else {
            return Ok(());
        };
        let Some((other, embedding)) = found.get(names::embedding(self.config.family)) else {
            return Ok(());
        };
        let differs = || {
            let what = format!(
                "{} differs from {}, and tie_word_embeddings says that they are one; with \
                 tie_word_embeddings = false both are read",
                names::OUTPUT,
                embedding.name
            );
            CheckpointError::corrupt(self.shards[shard].path(), what)
        };
        if (&output.shape, output.dtype) != (&embedding.shape, embedding.dtype) {
            return Err(differs());
        }
        let (mut left, mut at) = (output.size, 0);
        let (mut a, mut b) = (vec![0; COMPARED], vec![0; COMPARED]);
        while left > 0 {
            let now = left.min(COMPARED as u64) as usize;
            self.shards[shard].read(&mut a[..now], output.begin + at)?;
            self.shards[*other].read(&mut b[..now], embedding.begin + at)?;
            if a[..now] != b[..now] {
                return Err(differs());
            }
            (left, at) = (left - now as u64, at + now as u64);
        }
        Ok(())
    }

    /// The elements of a box of a part, given as it lies in ours.
    fn read_part(
        &self,
        part: &Part,
        slice: &Slice,
        size: usize,
    ) -> Result<Vec<u8>, CheckpointError> {
        let turned = |dims: &[usize]| dims.iter().rev().copied().collect();
        let stored = match part.transposed {
            true => Slice {
                offset: turned(&slice.offset),
                shape: turned(&slice.shape),
            },
            false => slice.clone(),
        };
        let mut bytes = vec![0; stored.len() * size];
        for run in stored.runs(&part.shape) {
            let range = run.in_slice * size..(run.in_slice + run.len) * size;
            let at = part.begin + (run.in_tensor * size) as u64;
            self.shards[part.shard].read(&mut bytes[range], at)?;
        }
        match part.transposed {
            true => Ok(transpose(&bytes, stored.shape[0], stored.shape[1], size)),
            false => Ok(bytes),
        }
    }
}

impl TensorSource for HfFolder {
    fn name(&self) -> String {
        self.path.display().to_string()
    }

    fn keys(&self) -> Vec<String> {
        self.tensors.keys().cloned().collect()
    }

    fn tensor(&self, key: &str) -> Option<TensorMeta> {
        Some(self.tensors.get(key)?.meta.clone())
    }

    fn read(&self, key: &str, slice: &Slice) -> Result<Vec<u8>, CheckpointError> {
        let Some(Own { meta, parts }) = self.tensors.get(key) else {
            return Err(CheckpointError::Missing {
                of: self.name(),
                keys: vec![key.into()],
            });
        };
        if !slice.fits(&meta.shape) {
            return Err(CheckpointError::Slice {
                key: key.into(),
                shape: meta.shape.clone(),
                slice: slice.clone(),
            });
        }
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

/// Whether a folder is one of Hugging Face: it has a `config.json`.
pub fn is_hf_folder(path: &Path) -> bool {
    path.join(CONFIG).is_file()
}
