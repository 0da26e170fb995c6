//! What made a pair of token files.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::Tokenizer;
use crate::bounded;
use crate::partial::replace_file;

/// The largest description that is read: its longest part is a list of inputs.
const LARGEST: u64 = 64 << 20;

/// What made a pair of token files `PREFIX.bin` and `PREFIX.idx`, written beside them as `PREFIX.json`.
///
/// Of a file that is read all may be missing, and what else it says has no effect: Megatron writes none, and
/// other programs may write their own. What is there must be of its type.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TokenFileInfo {
    /// [`Tokenizer::fingerprint`], as `xxh3:` and 16 hexadecimal digits: equal for files of one tokenizer.
    pub tokenizer: Option<String>,
    /// [`Tokenizer::name`]: where it lay.
    pub tokenizer_path: Option<String>,
    /// [`Tokenizer::vocabulary`].
    pub vocabulary: Option<usize>,
    /// The token that ends a document, where one is known.
    pub eod: Option<u32>,
    /// Whether every document ends with it.
    pub eod_appended: bool,
    /// The number of documents.
    pub documents: u64,
    /// The number of tokens, those that end documents among them; 0 where it is not known.
    pub tokens: u64,
    /// The bytes of the documents as UTF-8 text; 0 where it is not known.
    pub bytes: u64,
    /// The key of the JSON objects that the text stood under.
    pub key: Option<String>,
    /// The files that the text was read from.
    pub inputs: Vec<String>,
}

/// Why the description of token files cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum InfoError {
    /// The operating system refused.
    #[error("cannot {action} '{path}': {source}")]
    Io {
        /// What was tried, as a verb.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The reason the operating system gives.
        source: io::Error,
    },
    /// The file is none of its kind.
    #[error("'{path}' does not describe token files: {source}")]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What the reader of JSON found.
        source: serde_json::Error,
    },
}

impl TokenFileInfo {
    /// What `tokenizer` has made of nothing so far.
    pub fn new(tokenizer: &Tokenizer) -> Self {
        Self {
            tokenizer: Some(format!("xxh3:{:016x}", tokenizer.fingerprint())),
            tokenizer_path: Some(tokenizer.name().into()),
            vocabulary: Some(tokenizer.vocabulary()),
            eod: tokenizer.eod(),
            ..Self::default()
        }
    }

    /// Whether `tokenizer` can have made the files, as far as is known.
    pub fn is_of(&self, tokenizer: &Tokenizer) -> bool {
        self.tokenizer.is_none() || self.tokenizer == Self::new(tokenizer).tokenizer
    }

    /// Where it stands: `PREFIX.json`.
    pub fn path(prefix: &Path) -> PathBuf {
        let mut path = prefix.as_os_str().to_os_string();
        path.push(".json");
        path.into()
    }

    /// What a file with this content says.
    ///
    /// # Errors
    ///
    /// What the reader of JSON found.
    pub fn parse(content: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(content)
    }

    /// Reads it; files that were made elsewhere have none.
    ///
    /// # Errors
    ///
    /// [`InfoError`].
    pub fn read(prefix: &Path) -> Result<Option<Self>, InfoError> {
        let path = Self::path(prefix);
        match bounded::read(&path, LARGEST) {
            Ok(content) => match Self::parse(&content) {
                Ok(info) => Ok(Some(info)),
                Err(source) => Err(InfoError::Invalid { path, source }),
            },
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(source) => Err(InfoError::Io {
                action: "read",
                path,
                source,
            }),
        }
    }

    /// What its file has.
    ///
    /// # Errors
    ///
    /// What the writer of JSON found.
    pub fn to_bytes(&self) -> Result<Vec<u8>, serde_json::Error> {
        let mut text = serde_json::to_vec_pretty(self)?;
        text.push(b'\n');
        Ok(text)
    }

    /// Writes it, whole or not at all.
    ///
    /// # Errors
    ///
    /// [`InfoError::Io`].
    pub fn write(&self, prefix: &Path) -> Result<(), InfoError> {
        let path = Self::path(prefix);
        let write = || replace_file(&path, &self.to_bytes()?);
        write().map_err(|source| InfoError::Io {
            action: "write",
            path: path.clone(),
            source,
        })
    }

    /// Bytes of text that a token stands for, on average; nothing where there are no tokens.
    pub fn bytes_per_token(&self) -> Option<f64> {
        (self.tokens > 0 && self.bytes > 0).then(|| self.bytes as f64 / self.tokens as f64)
    }
}
