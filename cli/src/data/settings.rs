//! The `[data]` table of a recipe, and the flags that take its place.

use std::path::{Path, PathBuf};

use burn_megatron::data::indexed::{bin_path, idx_path};
use clap::Args;
use serde::{Deserialize, Serialize};

use crate::recipe::Error;

/// What a run is trained on: text, or token files.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Data {
    /// Text: a file or a folder; that of this repository where neither this nor `files` is given.
    pub path: Option<PathBuf>,
    /// A tokenizer.json, a folder that has one, or `bytes`, which is so for text where not given. Token
    /// files have tokens already; with them it is the one of the prompt and of the text at the end.
    pub tokenizer: Option<String>,
    /// The shares of training, validation and test of token files, as in "969,30,1".
    pub split: Option<String>,
    /// Where the order of the samples of token files is kept; where not given, each process finds it anew.
    pub cache: Option<PathBuf>,
    /// The token that ends a document of token files, where PREFIX.json does not say so.
    pub eod: Option<u32>,
    /// Whether whole documents are laid side by side, of which none sees the others.
    pub packing: bool,
    /// Whether the tokens after the end of a document see nothing of it.
    pub reset_attention: bool,
    /// Whether what follows the end of a document has no loss.
    pub eod_mask_loss: bool,
    /// Token files.
    pub files: Vec<Files>,
}

/// One pair of token files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Files {
    /// `PREFIX`, of which there are `PREFIX.bin` and `PREFIX.idx`.
    Prefix(PathBuf),
    /// The same with its share of the samples.
    Weighted(Weighted),
}

/// A pair of token files and its share of the samples.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Weighted {
    /// `PREFIX`, of which there are `PREFIX.bin` and `PREFIX.idx`.
    pub prefix: PathBuf,
    /// Its share, in any unit.
    pub weight: f64,
}

impl Files {
    /// The path without an ending.
    pub fn prefix(&self) -> &Path {
        match self {
            Self::Prefix(prefix) => prefix,
            Self::Weighted(weighted) => &weighted.prefix,
        }
    }

    /// Its share, where one is given.
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

/// Flags of data; each one takes the place of a key of `[data]`.
#[derive(Args, Debug, Default)]
pub struct DataArgs {
    /// What to train on: a text file, a folder whose .rs, .md and .txt files are read, or the PREFIX of
    /// PREFIX.bin and PREFIX.idx. The default is the text of this repository.
    #[arg(long, value_name = "PATH|PREFIX")]
    pub data: Option<PathBuf>,
    /// What makes tokens of text: a tokenizer.json, a folder that has one, or bytes.
    #[arg(long, value_name = "PATH|bytes")]
    pub tokenizer: Option<String>,
    /// The shares of training, validation and test of token files.
    #[arg(long, value_name = "SHARES")]
    pub split: Option<String>,
    /// Where the order of the samples of token files is kept.
    #[arg(long, value_name = "FOLDER")]
    pub data_cache: Option<PathBuf>,
}

impl DataArgs {
    /// Puts the flags in the place of the recipe's settings.
    pub fn apply(&self, data: &mut Data) {
        if let Some(path) = &self.data {
            let was_files = !data.files.is_empty();
            match prefix_of(path) {
                Some(prefix) => {
                    if !was_files {
                        // It made tokens of the text that is not read any more.
                        data.tokenizer = None;
                    }
                    data.path = None;
                    data.files = vec![Files::Prefix(prefix)];
                }
                // What the recipe says of its token files has no meaning any more.
                None if was_files => {
                    *data = Data {
                        path: Some(path.clone()),
                        ..Data::default()
                    }
                }
                None => data.path = Some(path.clone()),
            }
        }
        data.tokenizer = self.tokenizer.clone().or(data.tokenizer.take());
        data.split = self.split.clone().or(data.split.take());
        data.cache = self.data_cache.clone().or(data.cache.take());
    }
}

/// The prefix of token files, where it is that of some, or one of them.
fn prefix_of(path: &Path) -> Option<PathBuf> {
    let ends = |ending: &str| {
        path.extension()
            .is_some_and(|extension| extension == ending)
    };
    let prefix = match ends("bin") || ends("idx") {
        true => path.with_extension(""),
        false => path.to_path_buf(),
    };
    // A text of that name is meant where there is one.
    let is_text = prefix == path && path.exists();
    let any = bin_path(&prefix).exists() || idx_path(&prefix).exists();
    (any && !is_text).then_some(prefix)
}

impl Data {
    /// Refuses settings that would do nothing.
    ///
    /// # Errors
    /// The setting, and what it needs.
    pub fn check(&self) -> Result<(), Error> {
        if self.path.is_some() && !self.files.is_empty() {
            return Err("data.path is text and data.files are tokens: give one of them".into());
        }
        let given = [
            ("split (--split)", self.split.is_some()),
            ("cache (--data-cache)", self.cache.is_some()),
            ("eod", self.eod.is_some()),
            ("packing", self.packing),
            ("reset_attention", self.reset_attention),
            ("eod_mask_loss", self.eod_mask_loss),
        ];
        match given.iter().find(|(_, given)| *given) {
            Some((name, _)) if self.files.is_empty() => Err(format!(
                "data.{name} is about token files, and the data is text; `burn-megatron preprocess` makes \
                 token files of text, and data.files names them"
            )
            .into()),
            _ => Ok(()),
        }
    }

    /// Forgets where things lie, which may differ from machine to machine; what is in them may not, and is
    /// in the fingerprint of the data.
    pub fn forget_places(&mut self) {
        (self.path, self.cache) = (None, None);
        self.tokenizer = self.tokenizer.take().map(|_| "tokenizer".into());
        for files in &mut self.files {
            *files.prefix_mut() = PathBuf::new();
        }
    }
}
