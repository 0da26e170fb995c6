//! The `[data]` table of a recipe, and the flags that override it.

use std::path::{Path, PathBuf};

use burn_megatron_data::gpt::{IndexCache, Split};
use burn_megatron_data::indexed::{bin_path, idx_path};
use burn_megatron_data::{TextData, TokenFile, TokenFilesConfig};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::chat::ChatConfig;
use crate::documents::is_conversation;
use crate::error::Error;

/// The training data: text, token files, or conversations.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DataConfig {
    /// The training text: a text, JSON Lines, Parquet or Arrow file, or a folder that contains such files. If `path`,
    /// `files` and `chat` are all missing, the text of this repository is used.
    #[schemars(extend("resume" = "may_differ", "value" = "PATH"))]
    pub path: Option<PathBuf>,
    /// The key of the text in JSON Lines, or the name of the text column in Parquet and Arrow. The default is `text`.
    #[schemars(extend("flag" = "json-key", "resume" = "may_differ"))]
    pub json_key: Option<String>,
    /// The extensions of the files that are read if `path` is a folder.
    #[schemars(extend("flag" = "extensions", "resume" = "may_differ"))]
    pub extensions: Vec<String>,
    /// The tokenizer: a tokenizer.json, a folder that contains a tokenizer.json, or `bytes`, which uses every byte as a
    /// token. The default for text is `bytes`. With token files, the tokenizer is used only for the generated sample
    /// and its prompt.
    #[schemars(extend("flag" = "tokenizer", "resume" = "may_differ", "value" = "PATH|bytes"))]
    pub tokenizer: Option<String>,
    /// Whether the tokenizer adds its special tokens, such as `<s>`, to each document of a text. The default is true.
    /// For token files, use `preprocess --special-tokens` instead.
    #[schemars(extend("resume" = "may_differ"))]
    pub special_tokens: Option<bool>,
    /// The shares of the token files that are used for training, validation and test, as in "969,30,1". For text, the
    /// only possible value is "100,0,0", which means that no data is held out.
    #[schemars(extend("value" = "SHARES"))]
    pub split: Option<String>,
    /// The folder in which the order of the samples in token files is cached. By default, each process computes the
    /// order.
    #[schemars(extend("resume" = "may_differ", "value" = "PATH"))]
    pub cache: Option<PathBuf>,
    /// The id of the end-of-document token in token files, if PREFIX.json does not define it.
    pub eod: Option<u32>,
    /// Whether samples consist of complete documents that do not attend to each other.
    pub packing: bool,
    /// Whether attention is reset at the end of a document.
    pub reset_attention: bool,
    /// Whether the loss of the token after the end of a document is masked.
    pub eod_mask_loss: bool,
    /// The token files, instead of text.
    #[schemars(extend("resume" = "may_differ"))]
    pub files: Vec<TokenFileEntry>,
    /// The conversations for fine-tuning, instead of text.
    #[schemars(extend("resume" = "may_differ"))]
    pub chat: Option<ChatConfig>,
}

/// A pair of token files (PREFIX.bin and PREFIX.idx), with or without a weight.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum TokenFileEntry {
    /// The common path `PREFIX` of the files `PREFIX.bin` and `PREFIX.idx`.
    Prefix(PathBuf),
    /// The prefix and the weight of the token files.
    Weighted(WeightedTokenFiles),
}

/// A pair of token files with a weight.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WeightedTokenFiles {
    /// The common path `PREFIX` of the files `PREFIX.bin` and `PREFIX.idx`.
    pub prefix: PathBuf,
    /// The weight of these files. The share of samples from these files is the weight divided by the sum of all
    /// weights.
    pub weight: f64,
}

impl TokenFileEntry {
    /// Returns the path without an extension.
    pub fn prefix(&self) -> &Path {
        match self {
            Self::Prefix(prefix) => prefix,
            Self::Weighted(weighted) => &weighted.prefix,
        }
    }

    /// Returns the weight, if given.
    pub fn weight(&self) -> Option<f64> {
        match self {
            Self::Prefix(_) => None,
            Self::Weighted(weighted) => Some(weighted.weight),
        }
    }

    fn prefix_mut(&mut self) -> &mut PathBuf {
        match self {
            Self::Prefix(prefix) => prefix,
            Self::Weighted(weighted) => &mut weighted.prefix,
        }
    }
}

/// Returns the prefix of token files if `path` is such a prefix or one of the files.
fn prefix_of(path: &Path) -> Option<PathBuf> {
    let ends = |ending: &str| {
        path.extension()
            .is_some_and(|extension| extension == ending)
    };
    let prefix = if ends("bin") || ends("idx") {
        path.with_extension("")
    } else {
        path.to_path_buf()
    };
    // A text file with the name of the prefix takes precedence.
    let is_text = prefix == path && path.exists();
    let any = bin_path(&prefix).exists() || idx_path(&prefix).exists();
    (any && !is_text).then_some(prefix)
}

impl DataConfig {
    /// Replaces the data by the data of `--data`. Drops settings that do not apply to it. With `is_text`, a file of
    /// conversations is read as text.
    pub fn read_from(&mut self, path: &Path, is_text: bool) {
        if !is_text && is_conversation(path) {
            let tokenizer = self.tokenizer.take().filter(|_| self.files.is_empty());
            *self = Self {
                tokenizer,
                chat: Some(ChatConfig {
                    files: vec![path.into()],
                    ..self.chat.take().unwrap_or_default()
                }),
                ..Self::default()
            };
            return;
        }
        // The settings of conversations no longer apply.
        self.chat = None;
        let was_files = !self.files.is_empty();
        match prefix_of(path) {
            Some(prefix) => {
                if !was_files {
                    // The tokenizer belongs to the text, which is no longer read.
                    self.tokenizer = None;
                }
                (self.path, self.json_key, self.extensions) = (None, None, vec![]);
                self.special_tokens = None;
                self.files = vec![TokenFileEntry::Prefix(prefix)];
            }
            // The token file settings of the recipe no longer apply.
            None if was_files => {
                *self = Self {
                    path: Some(path.into()),
                    ..Self::default()
                };
            }
            None => self.path = Some(path.into()),
        }
    }

    /// Checks that each setting has an effect.
    ///
    /// # Errors
    /// Returns an error that names the setting without effect, and the remedy.
    pub fn check(&self) -> Result<(), Error> {
        if self.path.is_some() && !self.files.is_empty() {
            return Err(
                "data.path (text) conflicts with data.files (tokens): remove one of them".into(),
            );
        }
        let of_text = [
            ("special_tokens", self.special_tokens.is_some()),
            ("json_key (--json-key)", self.json_key.is_some()),
            ("extensions (--extensions)", !self.extensions.is_empty()),
        ];
        let is_text = self.files.is_empty() && self.chat.is_none();
        if let Some((name, _)) = of_text.iter().find(|(_, given)| *given && !is_text) {
            let what = if self.chat.is_some() {
                "[data.chat]"
            } else {
                "token files"
            };
            return Err(
                format!("data.{name} requires text, but the data is {what}; remove it").into(),
            );
        }
        let split = self.split.as_ref().map(|split| split.parse::<Split>());
        let all_to_train = split
            .transpose()?
            .is_some_and(|split| split.is_training_only());
        let has_split = self.split.is_some() && !(all_to_train && self.chat.is_none());
        let given = [
            ("split (--data.split)", has_split),
            ("cache (--data.cache)", self.cache.is_some()),
            ("eod", self.eod.is_some()),
            ("packing", self.packing),
            ("eod_mask_loss", self.eod_mask_loss),
        ];
        if let Some(chat) = &self.chat {
            if self.path.is_some() || !self.files.is_empty() {
                return Err("[data.chat] (conversations) conflicts with data.path (text) and data.files (tokens): keep \
                            only one of them".into());
            }
            let reset = ("reset_attention", self.reset_attention);
            if let Some((name, _)) = given.iter().chain([&reset]).find(|(_, given)| *given) {
                return Err(format!(
                    "data.{name} requires token files, but the data is [data.chat]; remove it{}",
                    match *name {
                        "packing" => ", or set data.chat.packing",
                        "split (--data.split)" =>
                            ", or set data.chat.held_out (0 holds nothing out)",
                        _ => "",
                    }
                )
                .into());
            }
            return chat.check();
        }
        match given.iter().find(|(_, given)| *given) {
            Some((name, _)) if self.files.is_empty() => Err(format!(
                "data.{name} requires token files, but the data is text; convert it with `burn-megatron preprocess`, \
                 and set data.files{}",
                match *name {
                    "split (--data.split)" => ". A tenth of a text is held out; \"100,0,0\" holds nothing out",
                    _ => "",
                }
            )
            .into()),
            _ => Ok(()),
        }
    }

    /// Checks that a tokenizer can tokenize the text.
    ///
    /// # Errors
    /// Returns an error for a setting that applies only to bytes.
    pub fn check_tokens(&self) -> Result<(), Error> {
        match self.reset_attention {
            true => Err(
                "data.reset_attention of a text conflicts with data.tokenizer, because it requires text as bytes; \
                 convert the text with `burn-megatron preprocess`, and set data.files"
                    .into(),
            ),
            false => Ok(()),
        }
    }

    /// Checks that the bytes of the text can be its tokens.
    ///
    /// # Errors
    /// Returns an error for a setting that has no effect on bytes.
    pub fn check_bytes(&self) -> Result<(), Error> {
        match self.special_tokens {
            Some(true) => {
                Err("data.special_tokens = true has no effect on bytes; remove it".into())
            }
            _ => Ok(()),
        }
    }

    /// Returns whether each document of a text gets the special tokens of its tokenizer.
    pub fn adds_special_tokens(&self) -> bool {
        self.special_tokens.unwrap_or(true)
    }

    /// Returns whether samples contain several documents that do not attend to each other.
    pub fn has_documents(&self) -> bool {
        self.packing || self.reset_attention
    }

    /// Sets whether the documents of a text attend to each other.
    pub fn with_documents(&self, text: TextData) -> TextData {
        text.with_reset_attention(self.reset_attention)
    }

    /// Returns the configuration of the token files, without the values from their tokenizer.
    ///
    /// # Errors
    /// Returns an error if the shares are invalid.
    pub fn token_files(&self) -> Result<TokenFilesConfig, Error> {
        let files = self.files.iter().map(|files| TokenFile {
            prefix: files.prefix().to_path_buf(),
            weight: files.weight(),
        });
        let mut config = TokenFilesConfig::new(files.collect());
        if let Some(split) = &self.split {
            config.split = split.parse()?;
        }
        config.cache = self.cache.as_deref().map(IndexCache::new);
        config.packing = self.packing;
        config.reset_attention = self.reset_attention;
        config.eod_mask_loss = self.eod_mask_loss;
        Ok(config)
    }

    /// Returns a name for the data: the name of the first file or folder.
    pub fn name(&self) -> Option<String> {
        let files = self.files.first().map(TokenFileEntry::prefix);
        let chat = || self.chat.as_ref()?.files.first().map(PathBuf::as_path);
        let path = self.path.as_deref().or(files).or_else(chat)?;
        Some(path.file_name()?.to_string_lossy().into_owned())
    }

    /// Clears the paths, which may differ between machines. The contents must be the same, and are covered by the
    /// fingerprint of the data.
    pub fn clear_paths(&mut self) {
        (self.path, self.cache) = (None, None);
        self.tokenizer = self.tokenizer.take().map(|_| "tokenizer".into());
        for files in &mut self.files {
            *files.prefix_mut() = PathBuf::new();
        }
        if let Some(chat) = &mut self.chat {
            chat.clear_paths();
        }
    }
}
