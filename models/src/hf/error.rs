//! Errors that occur when Hugging Face folders are read or written.

use std::path::PathBuf;

use burn_megatron::checkpoint::CheckpointError;

/// An error for an invalid or unsupported `config.json`, or for a model that no supported Hugging Face family can
/// describe.
#[derive(Debug, thiserror::Error)]
pub enum HfConfigError {
    /// The file is not a JSON object.
    #[error("not a JSON object: {0}")]
    Json(serde_json::Error),
    /// The `model_type` is unknown.
    #[error("unknown model_type = {found}: expected {expected}")]
    Family {
        /// The `model_type` in the file.
        found: String,
        /// The supported `model_type`s.
        expected: String,
    },
    /// A required key is missing in `config.json`.
    #[error("{family} requires {key}, which is missing")]
    Missing {
        /// The `model_type` that requires the key.
        family: &'static str,
        /// The missing key.
        key: String,
    },
    /// A key is unknown and could change what the model computes.
    #[error("unknown {key} = {value} for {family}, which could change the results of the model")]
    Unknown {
        /// The `model_type` in the file.
        family: &'static str,
        /// The unknown key.
        key: String,
        /// The value of the key.
        value: String,
    },
    /// The value of a key is not supported.
    #[error("invalid {key} = {value}: expected {fits}")]
    Value {
        /// The key whose value is not supported.
        key: String,
        /// The value of the key.
        value: String,
        /// The supported values.
        fits: String,
    },
    /// The sizes of the model are inconsistent.
    #[error("{0}")]
    Sizes(String),
    /// No supported Hugging Face family can describe the model.
    #[error("no supported Hugging Face family computes this model: {0}")]
    NoFamily(String),
}

/// An error of reading or writing a Hugging Face folder.
#[derive(Debug, thiserror::Error)]
pub enum HfError {
    /// The `config.json` of the folder is invalid.
    #[error("{}: {source}", path.display())]
    Config {
        /// The path of the `config.json`.
        path: PathBuf,
        /// The reason why the `config.json` is invalid.
        source: HfConfigError,
    },
    /// The tensors cannot be read or written.
    #[error(transparent)]
    Tensors(#[from] CheckpointError),
}
