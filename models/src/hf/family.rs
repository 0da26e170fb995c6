//! The differences between families of models in Hugging Face folders.

use std::fmt::Debug;

use burn_megatron::model::ModelConfig;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::{ConfigKeys, HfConfigError, WeightMapping};

/// The `model_type`s of Hugging Face whose models a [`ModelConfig`] describes: an enum with a variant for each, or a
/// unit struct for a single one.
///
/// With it, [`HfFolder`](super::HfFolder) reads their folders, and [`export`](super::export) writes them.
pub trait HfFamily: Copy + Debug + PartialEq + Send + Sync + 'static {
    /// The configuration.
    type Model: ModelConfig;

    /// All of them.
    const ALL: &'static [Self];

    /// The names in its files.
    fn names(self) -> HfNames;

    /// The one that computes a model, if any does; see [`check`](Self::check).
    fn of_model(model: &Self::Model) -> Self;

    /// Checks that it computes a model, whose sizes are consistent. By default it computes any.
    ///
    /// # Errors
    ///
    /// [`HfConfigError::NoFamily`], which names the first setting that does not fit.
    fn check(self, _model: &Self::Model) -> Result<(), HfConfigError> {
        Ok(())
    }

    /// Takes the model from the keys of a `config.json`. Special tokens and the type of the weights are read by the
    /// caller; a key that is left is an error, unless it is known not to change what a model computes.
    ///
    /// # Errors
    ///
    /// [`HfConfigError`], which names the key, its value and what is supported.
    fn read(self, keys: &mut ConfigKeys) -> Result<Self::Model, HfConfigError>;

    /// Returns how the class of `transformers` reads missing keys and `null`. The default has no entries.
    fn class_defaults(self) -> ClassDefaults {
        ClassDefaults::default()
    }

    /// The model of a folder that `has` tensors of these names, if a part is missing that `config.json` has and the files may
    /// lack, and what it is. By default no part may be missing.
    fn without_missing(
        self,
        _model: &Self::Model,
        _has: &dyn Fn(&str) -> bool,
    ) -> Option<(Self::Model, &'static str)> {
        None
    }

    /// Tensors of the files that repeat others, as names of the copy and the original: by default none. They are written
    /// after [`tensors`](Self::tensors); those that a folder has are compared with the original and not read.
    fn copies(self, _model: &Self::Model) -> Vec<(String, &'static str)> {
        vec![]
    }

    /// The keys of the model's `config.json`; the caller adds `model_type`, `architectures`, the special tokens and
    /// the type of the weights.
    fn write(self, model: &Self::Model) -> Map<String, Value>;

    /// The tensors of its files, in the order in which they are written. Without one for the
    /// [output](HfNames::output), the output is tied to the embedding.
    fn tensors(self, model: &Self::Model) -> Vec<WeightMapping>;

    /// The tensors of a folder that `has` tensors of these names: by default those of [`tensors`](Self::tensors), with
    /// which any folder must fill the same parameters.
    fn stored_tensors(
        self,
        model: &Self::Model,
        _has: &dyn Fn(&str) -> bool,
    ) -> Vec<WeightMapping> {
        self.tensors(model)
    }

    /// The `model_type`.
    fn name(self) -> &'static str {
        self.names().model_type
    }

    /// The one with this `model_type`.
    fn of_name(name: &str) -> Option<Self> {
        let mut families = Self::ALL.iter().copied();
        families.find(|family| family.name() == name)
    }
}

/// The values that a class of `transformers` uses for missing keys, and the keys that it requires not to be `null`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct ClassDefaults {
    /// The values of keys that a `config.json` does not have.
    pub missing: Map<String, Value>,
    /// The keys that must not be `null`.
    pub not_null: Vec<String>,
}

/// The names of a family in Hugging Face files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HfNames {
    /// The `model_type`, which is also the name of the family in a recipe and a checkpoint.
    pub model_type: &'static str,
    /// The class of `transformers` for causal language modeling.
    pub architecture: &'static str,
    /// The prefix of all tensors except the output's. Files of the decoder alone leave it out.
    pub prefix: &'static str,
    /// The weight of the embedding.
    pub embedding: &'static str,
    /// The weight of the output layer. Files of a model with a tied output may have it, equal to the embedding.
    pub output: &'static str,
    /// Endings of the names of buffers in old files, which are not weights and are left out.
    pub buffers: &'static [&'static str],
}
