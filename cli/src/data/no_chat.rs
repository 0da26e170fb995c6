//! `[data.chat]` in a build without the feature `tokenizers`: the table is parsed, and using it is an error.

use std::path::PathBuf;
use std::sync::Arc;

use burn_megatron_data::Dataset;
use burn_megatron_data::tokenizer::Tokenizer;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::Error;

const NOT_BUILT: &str = "[data.chat] (conversations): this program was built without tokenizers; build it with \
                         --features tokenizers";

/// Conversations.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ChatConfig {
    /// Files of JSON lines.
    pub files: Vec<PathBuf>,
    /// The other settings.
    #[serde(flatten)]
    #[schemars(with = "std::collections::BTreeMap<String, serde_json::Value>")]
    pub others: toml::Table,
}

impl ChatConfig {
    /// # Errors
    /// Always: what reads conversations is not compiled in.
    pub fn check(&self) -> Result<(), Error> {
        Err(NOT_BUILT.into())
    }

    /// # Errors
    /// As [`check`](Self::check).
    pub fn open(&self, _tokenizer: &Tokenizer, _seq: usize) -> Result<Arc<dyn Dataset>, Error> {
        Err(NOT_BUILT.into())
    }

    /// Nothing is read of them.
    pub fn clear_paths(&mut self) {}
}
