//! What a folder of Hugging Face can be refused for.

use std::path::PathBuf;

use burn_megatron::checkpoint::CheckpointError;

/// What a `config.json` can be refused for, and a model that no `config.json` describes.
#[derive(Debug, thiserror::Error)]
pub enum HfConfigError {
    /// The file is no JSON object.
    #[error("is no JSON object: {0}")]
    Json(serde_json::Error),
    /// A family that is not known.
    #[error(
        "model_type = {found} is no family that is known; gpt2, llama, mistral, qwen2 and qwen3 are"
    )]
    Family {
        /// What the file says.
        found: String,
    },
    /// A key that must be there.
    #[error("{family} needs {key}, which is not there")]
    Missing {
        /// The `model_type`.
        family: &'static str,
        /// The key.
        key: String,
    },
    /// A key that nothing is known of: it might change what the model computes.
    #[error("{key} = {value} is not known for {family}, and could change what the model computes")]
    Unknown {
        /// The `model_type`.
        family: &'static str,
        /// The key.
        key: String,
        /// Its value.
        value: String,
    },
    /// A value that cannot be used.
    #[error("{key} = {value} cannot be used; {fits}")]
    Value {
        /// The key.
        key: String,
        /// Its value.
        value: String,
        /// What could.
        fits: String,
    },
    /// Sizes that do not fit each other.
    #[error("{0}")]
    Sizes(String),
    /// A model that no family computes.
    #[error("no family of Hugging Face computes this model: {0}")]
    NoFamily(String),
}

/// What a folder of Hugging Face can be refused for.
#[derive(Debug, thiserror::Error)]
pub enum HfError {
    /// Its configuration.
    #[error("{}: {source}", path.display())]
    Config {
        /// The `config.json`.
        path: PathBuf,
        /// What is wrong with it.
        source: HfConfigError,
    },
    /// Its tensors, or those that are written to it.
    #[error(transparent)]
    Tensors(#[from] CheckpointError),
}
