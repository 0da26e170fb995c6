//! Errors of Hugging Face folders.

use std::path::PathBuf;

use burn_megatron::checkpoint::CheckpointError;

/// An invalid or unsupported `config.json`, or a model that no `config.json` can describe.
#[derive(Debug, thiserror::Error)]
pub enum HfConfigError {
    /// The file is not a JSON object.
    #[error("not a JSON object: {0}")]
    Json(serde_json::Error),
    /// Unknown `model_type`.
    #[error("unknown model_type = {found}: expected {expected}")]
    Family {
        /// The value in the file.
        found: String,
        /// The supported values.
        expected: String,
    },
    /// A required key is missing.
    #[error("{family} requires {key}, which is missing")]
    Missing {
        /// The `model_type`.
        family: &'static str,
        /// The key.
        key: String,
    },
    /// Unknown key, which may change what the model computes.
    #[error("unknown {key} = {value} for {family}, which could change the results of the model")]
    Unknown {
        /// The `model_type`.
        family: &'static str,
        /// The key.
        key: String,
        /// Its value.
        value: String,
    },
    /// An unsupported value.
    #[error("invalid {key} = {value}: expected {fits}")]
    Value {
        /// The key.
        key: String,
        /// Its value.
        value: String,
        /// The values that are supported.
        fits: String,
    },
    /// Inconsistent sizes.
    #[error("{0}")]
    Sizes(String),
    /// No supported family computes the model.
    #[error("no supported Hugging Face family computes this model: {0}")]
    NoFamily(String),
}

/// An error of reading or writing a Hugging Face folder.
#[derive(Debug, thiserror::Error)]
pub enum HfError {
    /// The configuration of the folder is invalid.
    #[error("{}: {source}", path.display())]
    Config {
        /// The `config.json`.
        path: PathBuf,
        /// The reason.
        source: HfConfigError,
    },
    /// The tensors cannot be read or written.
    #[error(transparent)]
    Tensors(#[from] CheckpointError),
}
