//! The interface of a model family in Hugging Face folders.

use std::fmt::Debug;

use burn_megatron::model::ModelConfig;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::{ConfigKeys, HfConfigError, WeightMapping};

/// The `model_type`s of Hugging Face that a [`ModelConfig`] describes. Implement it for an enum with a variant for each
/// `model_type`, or for a unit struct if there is a single one.
///
/// [`HfFolder`](super::HfFolder) can then read their folders, and [`export`](super::export) can write them.
pub trait HfFamily: Copy + Debug + PartialEq + Send + Sync + 'static {
    /// The configuration of the model.
    type Model: ModelConfig;

    /// All families.
    const ALL: &'static [Self];

    /// Returns the names in the files of the family.
    fn names(self) -> HfNames;

    /// Returns the family that computes a model, if any: see [`check`](Self::check).
    fn of_model(model: &Self::Model) -> Self;

    /// Checks that the family can compute a model with consistent sizes. By default, it can compute any model.
    ///
    /// # Errors
    ///
    /// [`HfConfigError::NoFamily`], which names the first setting that does not fit.
    fn check(self, _model: &Self::Model) -> Result<(), HfConfigError> {
        Ok(())
    }

    /// Takes the model from the keys of a `config.json`. The caller reads the special tokens and the dtype of the
    /// weights. A remaining key is an error, unless it is known not to change what a model computes.
    ///
    /// # Errors
    ///
    /// [`HfConfigError`], which names the key, its value and the supported values.
    fn read(self, keys: &mut ConfigKeys) -> Result<Self::Model, HfConfigError>;

    /// Returns the values with which the class of `transformers` replaces missing keys and `null`. The default
    /// implementation returns no values.
    fn class_defaults(self) -> ClassDefaults {
        ClassDefaults::default()
    }

    /// Returns a model without a part that `config.json` describes but the files lack, and a description of this part.
    /// `has` returns whether the folder has a tensor. By default, no part may be missing.
    fn without_missing(
        self,
        _model: &Self::Model,
        _has: &dyn Fn(&str) -> bool,
    ) -> Option<(Self::Model, &'static str)> {
        None
    }

    /// Returns tensors of the files that repeat other tensors, as names of the copy and the original. The default
    /// implementation returns no tensors. Copies are written after [`tensors`](Self::tensors). Copies in a folder are
    /// compared with the original, but not loaded.
    fn copies(self, _model: &Self::Model) -> Vec<(String, &'static str)> {
        vec![]
    }

    /// Returns the keys of the model's `config.json`. The caller adds `model_type`, `architectures`, the special tokens
    /// and the dtype of the weights.
    fn write(self, model: &Self::Model) -> Map<String, Value>;

    /// Returns the tensors of the files, in the order in which they are written. If the [output](HfNames::output) has
    /// no tensor, it is tied to the embedding.
    fn tensors(self, model: &Self::Model) -> Vec<WeightMapping>;

    /// Returns the tensors of a folder. `has` returns whether the folder has a tensor. The default is
    /// [`tensors`](Self::tensors). The tensors of any folder must fill the same parameters.
    fn stored_tensors(
        self,
        model: &Self::Model,
        _has: &dyn Fn(&str) -> bool,
    ) -> Vec<WeightMapping> {
        self.tensors(model)
    }

    /// Returns the `model_type`.
    fn name(self) -> &'static str {
        self.names().model_type
    }

    /// Returns the family with this `model_type`.
    fn of_name(name: &str) -> Option<Self> {
        let mut families = Self::ALL.iter().copied();
        families.find(|family| family.name() == name)
    }
}

/// The values that a class of `transformers` uses for missing keys, and the keys that must not be `null`.
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
    /// The prefix of all tensors except the output. Files that contain only the decoder leave it out.
    pub prefix: &'static str,
    /// The name of the embedding weight.
    pub embedding: &'static str,
    /// The name of the output weight. Files of a model with a tied output may contain it, equal to the embedding.
    pub output: &'static str,
    /// Name endings of buffers in old files. Buffers are not weights, and are ignored.
    pub buffers: &'static [&'static str],
}
