//! `config.json`: the configuration of a Hugging Face model.

mod keys;
mod meaning;
mod shared;
#[cfg(test)]
mod tests;

use std::path::Path;

use burn_megatron::checkpoint::ElementType;
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::model::ModelConfig;

use super::folder::CONFIG;
use super::shard::read_text;
use super::{HfConfigError, HfError, HfFamily, ModelFamily};

pub use keys::ConfigKeys;
pub(super) use keys::unknown_type;

/// The ids of the special tokens in a `config.json`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecialTokenIds {
    /// The token at the beginning of a sequence.
    pub bos: Option<u32>,
    /// The tokens that end a sequence. A file may list several.
    pub eos: Vec<u32>,
    /// The padding token.
    pub pad: Option<u32>,
}

/// The content of a `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct HfConfig<F: HfFamily = ModelFamily> {
    /// The model family, which follows from `model_type`.
    pub family: F,
    /// The configuration of the model.
    pub model: F::Model,
    /// The dtype of the weights that `config.json` declares (`torch_dtype` or `dtype`). If a tensor in the weight files
    /// has another dtype, the dtype of the tensor is used.
    pub dtype: Option<ElementType>,
    /// The special tokens.
    pub tokens: SpecialTokenIds,
    /// The ignored keys: keys that neither `transformers` nor this crate reads. Keys that are known to have no effect
    /// are not listed.
    pub ignored: Vec<String>,
}

impl<F: HfFamily> HfConfig<F> {
    /// Reads the `config.json` of a folder.
    ///
    /// # Errors
    ///
    /// [`HfError`] if the file cannot be read or [parsed](Self::parse).
    pub fn read(folder: &Path) -> Result<Self, HfError> {
        let path = folder.join(CONFIG);
        Self::parse_at(&path, &read_text(&path)?)
    }

    /// Parses a `config.json`. Errors name the file as `path`.
    pub(super) fn parse_at(path: &Path, bytes: &[u8]) -> Result<Self, HfError> {
        Self::parse(bytes).map_err(|source| HfError::Config {
            path: path.to_path_buf(),
            source,
        })
    }

    /// Parses a `config.json`, in the format of `transformers` 4 or 5.
    ///
    /// An unknown key is an error if it could change what the model computes. Other unknown keys are
    /// [ignored](Self::ignored).
    ///
    /// # Errors
    ///
    /// [`HfConfigError`], which names the key, its value and the supported values.
    pub fn parse(bytes: &[u8]) -> Result<Self, HfConfigError> {
        let map = serde_json::from_slice(bytes).map_err(HfConfigError::Json)?;
        let (mut keys, family) = ConfigKeys::new::<F>(map)?;
        let mut config = Self {
            family,
            model: family.read(&mut keys)?,
            dtype: shared::dtype(&mut keys)?,
            tokens: shared::tokens(&mut keys)?,
            ignored: vec![],
        };
        let ignored = keys.ignored();
        keys.finish()?;
        config.ignored = ignored.take();
        config.check()?;
        Ok(config)
    }

    /// Creates the content of a `config.json` for a model. The Hugging Face family is selected from the settings of the
    /// model.
    ///
    /// # Errors
    ///
    /// [`HfConfigError::Sizes`] for inconsistent sizes, and [`HfConfigError::NoFamily`], which names the first setting
    /// that the family does not support.
    pub fn of(model: &F::Model) -> Result<Self, HfConfigError> {
        let config = Self {
            family: F::of_model(model),
            model: model.clone(),
            dtype: None,
            tokens: SpecialTokenIds::default(),
            ignored: vec![],
        };
        config.check()?;
        Ok(config)
    }

    /// Checks that the sizes of the model are consistent, and that the family can describe the model.
    ///
    /// # Errors
    ///
    /// [`HfConfigError::Sizes`] for inconsistent sizes, and [`HfConfigError::NoFamily`] for a setting that the family
    /// does not support.
    pub fn check(&self) -> Result<(), HfConfigError> {
        match self.model.check_layout(&ParallelConfig::new()) {
            Ok(()) => self.family.check(&self.model),
            Err(error) => Err(HfConfigError::Sizes(error.to_string())),
        }
    }

    /// Returns the configuration as the text of a `config.json`, in a format that `transformers` 4 and 5 can read.
    ///
    /// ```
    /// use burn_megatron_models::TransformerConfig;
    /// use burn_megatron_models::hf::{HfConfig, ModelFamily};
    ///
    /// let json = HfConfig::<ModelFamily>::of(&TransformerConfig::llama())?.to_json()?;
    /// let config = HfConfig::<ModelFamily>::parse(json.as_bytes())?;
    /// assert_eq!(config.family, ModelFamily::Llama);
    /// assert_eq!(config.model.hidden, 128);
    /// assert!(HfConfig::<ModelFamily>::parse(br#"{"model_type": "bert"}"#).is_err());
    /// # Ok::<(), burn_megatron_models::hf::HfConfigError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// See [`check`](Self::check).
    pub fn to_json(&self) -> Result<String, HfConfigError> {
        self.check()?;
        let value = serde_json::Value::Object(shared::keys(self));
        Ok(format!("{value:#}\n"))
    }
}
