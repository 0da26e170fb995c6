//! The `[data.chat]` table in a build without the feature `tokenizers`. The table is parsed, but using it is an
//! error.

use std::path::PathBuf;
use std::sync::Arc;

use burn_megatron_data::Dataset;
use burn_megatron_data::tokenizer::Tokenizer;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::Error;

const NOT_BUILT: &str = "[data.chat] (conversations): this program was built without tokenizers; build it with \
                         --features tokenizers";

/// Conversations for fine-tuning.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ChatConfig {
    /// Files of JSON lines.
    pub files: Vec<PathBuf>,
    /// All other settings.
    #[serde(flatten)]
    #[schemars(with = "std::collections::BTreeMap<String, serde_json::Value>")]
    pub others: toml::Table,
}

impl ChatConfig {
    /// Rejects the table `[data.chat]`.
    ///
    /// # Errors
    /// Always returns an error, because conversations are not supported by this build.
    pub fn check(&self) -> Result<(), Error> {
        Err(NOT_BUILT.into())
    }

    /// Rejects the table `[data.chat]`.
    ///
    /// # Errors
    /// Always returns the error of [`check`](Self::check).
    pub fn open(&self, _tokenizer: &Tokenizer, _seq: usize) -> Result<Arc<dyn Dataset>, Error> {
        Err(NOT_BUILT.into())
    }

    /// Does nothing, because the paths are not used.
    pub fn clear_paths(&mut self) {}
}
