//! The interface that a model family implements to be read from and written to Hugging Face folders.

use std::fmt::Debug;

use burn_megatron::model::ModelConfig;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::{ConfigKeys, HfConfigError, WeightMapping};

/// A set of Hugging Face model families (`model_type`s) that a [`ModelConfig`] can describe. Implement this trait for
/// an enum with a variant per `model_type`, or for a unit struct if there is only one `model_type`.
///
/// [`HfFolder`](super::HfFolder) can then read Hugging Face folders of these families, and [`export`](super::export)
/// can write them.
pub trait HfFamily: Copy + Debug + PartialEq + Send + Sync + 'static {
    /// The model configuration that the families describe.
    type Model: ModelConfig;

    /// The list of all families.
    const ALL: &'static [Self];

    /// Returns the names that the Hugging Face files of the family use.
    fn names(self) -> HfNames;

    /// Returns the family that fits a model best. Use [`check`](Self::check) to find out whether the family can
    /// describe the model.
    fn of_model(model: &Self::Model) -> Self;

    /// Checks that the family can describe a model. The sizes of the model were already checked. The default
    /// implementation accepts any model.
    ///
    /// # Errors
    ///
    /// [`HfConfigError::NoFamily`], which names the first setting that the family does not support.
    fn check(self, _model: &Self::Model) -> Result<(), HfConfigError> {
        Ok(())
    }

    /// Creates the model configuration from the keys of a `config.json`. The implementation must take every key that it
    /// supports. The caller reads the special tokens and the dtype of the weights, and checks the remaining keys: see
    /// [`ConfigKeys::finish`].
    ///
    /// # Errors
    ///
    /// [`HfConfigError`], which names the key, its value and the supported values.
    fn read(self, keys: &mut ConfigKeys) -> Result<Self::Model, HfConfigError>;

    /// Returns the default values of the configuration class in `transformers`, which replace missing keys. The default
    /// implementation returns no values.
    fn class_defaults(self) -> ClassDefaults {
        ClassDefaults::default()
    }

    /// Removes a part of the model that `config.json` describes but whose tensors are not in the files, such as
    /// multi-token prediction. Returns the model without this part, and a description of the part. `has` returns
    /// whether the folder contains a tensor with a given name. The default implementation removes nothing.
    fn without_missing(
        self,
        _model: &Self::Model,
        _has: &dyn Fn(&str) -> bool,
    ) -> Option<(Self::Model, &'static str)> {
        None
    }

    /// Returns the tensors that the files contain twice, as pairs of the name of the copy and the name of the original.
    /// [`export`](super::export) writes the copies after the other tensors. When a folder is opened, each copy is
    /// compared with its original, but not loaded. The default implementation returns no copies.
    fn copies(self, _model: &Self::Model) -> Vec<(String, &'static str)> {
        vec![]
    }

    /// Returns the keys and values of the `config.json` that describes a model. The caller adds `model_type`,
    /// `architectures`, the special tokens and the dtype of the weights.
    fn write(self, model: &Self::Model) -> Map<String, Value>;

    /// Returns the mapping of each tensor of a model, in the order in which the tensors are written. If the list does
    /// not contain the [output weight](HfNames::output), the output layer is tied to the embedding.
    fn tensors(self, model: &Self::Model) -> Vec<WeightMapping>;

    /// Returns the mapping of each tensor of a folder. Implement this method if the folders of the family may contain
    /// different tensors for the same model. `has` returns whether the folder contains a tensor with a given name. For
    /// every folder, the mappings must fill the same parameters. The default implementation returns
    /// [`tensors`](Self::tensors).
    fn stored_tensors(
        self,
        model: &Self::Model,
        _has: &dyn Fn(&str) -> bool,
    ) -> Vec<WeightMapping> {
        self.tensors(model)
    }

    /// Returns the `model_type` of the family.
    fn name(self) -> &'static str {
        self.names().model_type
    }

    /// Returns the family with the `model_type` `name`, or `None` if no family has this `model_type`.
    fn of_name(name: &str) -> Option<Self> {
        let mut families = Self::ALL.iter().copied();
        families.find(|family| family.name() == name)
    }
}

/// The default values of a configuration class in `transformers`, and the keys that must not be `null`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct ClassDefaults {
    /// The default values of the keys that are missing in a `config.json`.
    pub missing: Map<String, Value>,
    /// The keys that must not be `null`.
    pub not_null: Vec<String>,
}

/// The names that the Hugging Face files of a family use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HfNames {
    /// The `model_type`, which is also the name of the family in a recipe and a checkpoint.
    pub model_type: &'static str,
    /// The class in `transformers` for causal language modeling, such as `LlamaForCausalLM`.
    pub architecture: &'static str,
    /// The prefix of the names of all tensors except the output weight. In files that contain only the decoder, the
    /// names have no prefix.
    pub prefix: &'static str,
    /// The name of the embedding weight.
    pub embedding: &'static str,
    /// The name of the weight of the output layer. If the output layer is tied to the embedding, files may contain this
    /// weight as a copy of the embedding weight.
    pub output: &'static str,
    /// The suffixes of the names of buffers. Some old files contain buffers, which are not weights and are ignored.
    pub buffers: &'static [&'static str],
}
