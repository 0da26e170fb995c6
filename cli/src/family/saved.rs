//! Models on disk: checkpoints and Hugging Face folders.

use std::path::{Path, PathBuf};

use burn_megatron::checkpoint::{Checkpoint, TensorSource};
use burn_megatron::nn::lora::LoraConfig;
use burn_megatron_models::hf::is_hf_folder;
use burn_megatron_models::hf::peft::is_peft_folder;
use toml::Table;

use super::{Adapters, FAMILY, Families, Model};
use crate::error::Error;
use crate::model_folder::{base_of, lora_of, open_checkpoint};

/// Error for weights that cannot be loaded with any recipe.
#[derive(Debug, thiserror::Error)]
#[error("the weights at {} (checkpoint.load, --load): {error}", path.display())]
pub struct WeightsError {
    path: PathBuf,
    error: Error,
}

impl WeightsError {
    fn new(path: &Path, error: Error) -> Self {
        let path = path.to_path_buf();
        Self { path, error }
    }
}

impl Families {
    /// Opens a Hugging Face folder, a checkpoint, or the latest checkpoint of a folder of checkpoints or of a run
    /// folder. Returns the model and its weights. Adapters in a checkpoint or a `peft` folder are merged into the
    /// weights.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read, or if the family of the model is not registered.
    pub fn open(&self, path: &Path) -> Result<(Model, Box<dyn TensorSource>), Error> {
        self.open_with(path, Adapters::Merged)
    }

    /// Opens a model like [`open`](Self::open), with the given treatment of adapters.
    ///
    /// # Errors
    /// See [`open`](Self::open).
    pub fn open_with(
        &self,
        path: &Path,
        adapters: Adapters,
    ) -> Result<(Model, Box<dyn TensorSource>), Error> {
        if let Some(opened) = self.open_adapters(path, adapters)? {
            return Ok(opened);
        }
        if is_hf_folder(path) {
            return self.hf(path)?.open(path);
        }
        let checkpoint = open_checkpoint(path)?;
        let model = self.model_of(&checkpoint)?;
        Ok((model, Box::new(checkpoint)))
    }

    /// Returns the model of the weights that [`open`](Self::open) opens, without the weights.
    ///
    /// # Errors
    /// See [`open`](Self::open).
    fn model_at(&self, path: &Path) -> Result<Model, Error> {
        if is_peft_folder(path) {
            return self.model_at(&base_of(path)?);
        }
        if is_hf_folder(path) {
            // The files may lack tensors of the model that `config.json` describes.
            return Ok(self.hf(path)?.open(path)?.0);
        }
        self.model_of(&open_checkpoint(path)?)
    }

    /// Returns the model with the settings of a recipe's `[model]`. Missing settings have the values of the weights
    /// at `path`, unless `settings` names another family. A nested table changes only the keys that it has.
    ///
    /// # Errors
    /// See [`open`](Self::open) and [`model`](Self::model).
    pub fn model_with_weights(&self, path: &Path, settings: &Table) -> Result<Model, Error> {
        let found = self
            .model_at(path)
            .map_err(|error| WeightsError::new(path, error))?;
        let family = settings.get(FAMILY).and_then(toml::Value::as_str);
        if settings.contains_key(FAMILY) && family != Some(found.family()) {
            return self.model_over_defaults(settings);
        }
        found.changed(settings)
    }

    /// Returns the settings of the adapters at `path`: a `peft` folder, or a checkpoint that has adapters. Returns
    /// `None` for weights without adapters.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read, or if the base model of the adapters is unknown.
    pub fn adapters_at(&self, path: &Path) -> Result<Option<LoraConfig>, Error> {
        let found = if is_peft_folder(path) {
            self.of_peft(path).map(|saved| Some(saved.lora))
        } else if is_hf_folder(path) {
            Ok(None)
        } else {
            open_checkpoint(path).and_then(|checkpoint| lora_of(&checkpoint))
        };
        found.map_err(|error| WeightsError::new(path, error).into())
    }

    /// Returns the model of a checkpoint.
    ///
    /// # Errors
    /// Returns an error if the settings are missing or invalid, or if their family is not registered.
    pub fn model_of(&self, checkpoint: &Checkpoint) -> Result<Model, Error> {
        let invalid = |error: &dyn std::fmt::Display| {
            let path = checkpoint.path().display();
            Error::from(format!(
                "{path}: invalid [model] in the recipe of the checkpoint: {error}"
            ))
        };
        let Some(settings) = checkpoint.metadata().config.get("model") else {
            return Err(invalid(&"the recipe has no model"));
        };
        let model = self.model_of_json(settings);
        let model = model.map_err(|error| invalid(&error))?;
        match model.check_layout(&Default::default()) {
            Ok(()) => Ok(model),
            Err(error) => Err(invalid(&error)),
        }
    }
}
