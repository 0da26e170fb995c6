//! Reads the adapter weights of a `peft` folder.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use burn_megatron::checkpoint::{CheckpointError, TensorMeta, TensorSlice, TensorSource};
use burn_megatron::nn::lora::{LoraConfig, LoraTarget};

use super::super::shard::{ShardFile, StoredTensors};
use super::super::stored::{Finder, StoredValues};
use super::super::transpose::transpose_matrices;
use super::super::{HfConfigError, HfError, HfFamily};
use super::{CONFIG, adapted_layers, all_mappings, config};

/// A `peft` folder as a [`TensorSource`] of LoRA adapter weights. Only the requested ranges of the file are read.
#[derive(Debug)]
pub struct PeftAdapter {
    path: PathBuf,
    lora: LoraConfig,
    shards: Vec<ShardFile>,
    tensors: BTreeMap<String, (TensorMeta, StoredValues)>,
}

impl PeftAdapter {
    /// Opens a `peft` folder with an adapter of the given model.
    ///
    /// # Errors
    ///
    /// [`HfError`] if a setting is not supported, if a tensor is missing or has another shape, or if a tensor belongs
    /// to a layer that cannot have an adapter.
    pub fn open<F: HfFamily>(
        path: &Path,
        (family, model): (F, &F::Model),
    ) -> Result<Self, HfError> {
        let mut lora = config::read(path)?;
        let (shard, entries) = ShardFile::open(&config::weights(path))?;
        let named = entries
            .into_iter()
            .map(|entry| (entry.name.clone(), (0, entry)));
        let mut found: StoredTensors = named.collect();
        lora.target_modules = targets(&found);
        let refused = |source| HfError::Config {
            path: path.join(CONFIG),
            source,
        };
        let layers = adapted_layers(model, &lora);
        let layers = layers.map_err(|error| refused(HfConfigError::Sizes(error.to_string())))?;
        let mapped = all_mappings(family, model, &layers).map_err(refused)?;
        let shards = vec![shard];
        let of = path.display().to_string();
        let mut tensors = BTreeMap::new();
        for factor in mapped {
            let finder = Finder {
                of: of.clone(),
                shards: &shards,
                found: &found,
            };
            let stored = finder.values(&factor)?;
            let meta = TensorMeta {
                key: factor.key.clone(),
                dtype: stored.dtype,
                shape: factor.shape.iter().rev().copied().collect(),
            };
            found.remove(&factor.name);
            tensors.insert(factor.key, (meta, stored));
        }
        if !found.is_empty() {
            let keys = found.into_keys().collect();
            return Err(CheckpointError::Unexpected { of, keys }.into());
        }
        Ok(Self {
            path: path.to_path_buf(),
            lora,
            shards,
            tensors,
        })
    }

    /// Returns the LoRA settings of the adapter. The target layers are the layers for which the folder contains
    /// tensors.
    pub fn lora(&self) -> &LoraConfig {
        &self.lora
    }
}

/// Returns the names of the target layers for which there are tensors.
fn targets(found: &StoredTensors) -> Vec<String> {
    let is_of = |target: &LoraTarget| {
        let part = format!(".{target}.lora_");
        found.keys().any(|name| name.contains(&part))
    };
    let targets = LoraTarget::ALL.into_iter().filter(is_of);
    targets.map(|target| target.name().to_string()).collect()
}

impl TensorSource for PeftAdapter {
    fn name(&self) -> String {
        self.path.display().to_string()
    }

    fn keys(&self) -> Vec<String> {
        self.tensors.keys().cloned().collect()
    }

    fn tensor(&self, key: &str) -> Option<TensorMeta> {
        Some(self.tensors.get(key)?.0.clone())
    }

    fn read(&self, key: &str, slice: &TensorSlice) -> Result<Vec<u8>, CheckpointError> {
        let Some((meta, stored)) = self.tensors.get(key) else {
            return Err(CheckpointError::missing(self.name(), key));
        };
        CheckpointError::check_bounds(key, &meta.shape, slice)?;
        let mut turned = slice.clone();
        turned.offset.reverse();
        turned.shape.reverse();
        let bytes = stored.read(&self.shards, &turned)?;
        Ok(transpose_matrices(&bytes, &turned.shape, meta.dtype.size()))
    }
}
