//! The sidecar of token files, which records how they were made.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::Tokenizer;
use burn_megatron::atomic_file::replace_file;
use burn_megatron::regular_file;

/// The maximum size of a sidecar, in bytes. Its longest part is the list of inputs.
const MAX_BYTES: u64 = 64 << 20;

/// The origin of the token files `PREFIX.bin` and `PREFIX.idx`, in the sidecar `PREFIX.json`.
///
/// Any field may be missing, and unknown fields are ignored: Megatron writes no sidecar, and other programs may write a
/// different sidecar. A field that is present must have the correct type.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TokenFileInfo {
    /// The [`Tokenizer::fingerprint`], as `xxh3:` and 16 hexadecimal digits. It is equal for all files of a tokenizer.
    pub tokenizer: Option<String>,
    /// The [`Tokenizer::name`]: the path of the tokenizer when the files were made.
    pub tokenizer_path: Option<String>,
    /// The [`Tokenizer::vocabulary`].
    pub vocabulary: Option<usize>,
    /// The end-of-document token, if known.
    pub eod: Option<u32>,
    /// Whether the end-of-document token follows every document.
    pub eod_appended: bool,
    /// Whether every document has the special tokens that the tokenizer adds to a text; `None` if unknown.
    pub special_tokens: Option<bool>,
    /// The number of documents.
    pub documents: u64,
    /// The number of tokens, including end-of-document tokens; 0 if unknown.
    pub tokens: u64,
    /// The size of the documents as UTF-8 text, in bytes; 0 if unknown.
    pub bytes: u64,
    /// The key of the text in the JSON objects.
    pub key: Option<String>,
    /// The files that the text was read from.
    pub inputs: Vec<String>,
}

/// An error of reading or writing a sidecar.
#[derive(Debug, thiserror::Error)]
pub enum TokenFileInfoError {
    /// A file system operation failed.
    #[error("cannot {action} '{path}': {source}")]
    Io {
        /// The operation, as a verb.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file is not a valid sidecar.
    #[error("'{path}' does not describe token files: {source}")]
    Invalid {
        /// The file.
        path: PathBuf,
        /// The error of the JSON parser.
        source: serde_json::Error,
    },
}

impl TokenFileInfo {
    /// Creates the information for `tokenizer`, before any text is tokenized.
    pub fn new(tokenizer: &Tokenizer) -> Self {
        Self {
            tokenizer: Some(format!("xxh3:{:016x}", tokenizer.fingerprint())),
            tokenizer_path: Some(tokenizer.name().into()),
            vocabulary: Some(tokenizer.vocabulary()),
            eod: tokenizer.eod(),
            ..Self::default()
        }
    }

    /// Returns whether `tokenizer` made the files. Also true if their tokenizer is unknown.
    pub fn is_of(&self, tokenizer: &Tokenizer) -> bool {
        self.tokenizer.is_none() || self.tokenizer == Self::new(tokenizer).tokenizer
    }

    /// Returns the path of the sidecar: `PREFIX.json`.
    pub fn path(prefix: &Path) -> PathBuf {
        let mut path = prefix.as_os_str().to_os_string();
        path.push(".json");
        path.into()
    }

    /// Parses the content of a sidecar.
    ///
    /// # Errors
    ///
    /// The error of the JSON parser.
    pub fn parse(content: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(content)
    }

    /// Reads the sidecar of a prefix. Returns `None` if the file does not exist.
    ///
    /// # Errors
    ///
    /// [`TokenFileInfoError`].
    pub fn read(prefix: &Path) -> Result<Option<Self>, TokenFileInfoError> {
        let path = Self::path(prefix);
        match regular_file::read(&path, MAX_BYTES) {
            Ok(content) => match Self::parse(&content) {
                Ok(info) => Ok(Some(info)),
                Err(source) => Err(TokenFileInfoError::Invalid { path, source }),
            },
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(source) => Err(TokenFileInfoError::Io {
                action: "read",
                path,
                source,
            }),
        }
    }

    /// Serializes the sidecar.
    ///
    /// # Errors
    ///
    /// The error of the JSON serializer.
    pub fn to_bytes(&self) -> Result<Vec<u8>, serde_json::Error> {
        let mut text = serde_json::to_vec_pretty(self)?;
        text.push(b'\n');
        Ok(text)
    }

    /// Writes the sidecar atomically.
    ///
    /// # Errors
    ///
    /// [`TokenFileInfoError::Io`].
    pub fn write(&self, prefix: &Path) -> Result<(), TokenFileInfoError> {
        let path = Self::path(prefix);
        let write = || replace_file(&path, &self.to_bytes()?);
        write().map_err(|source| TokenFileInfoError::Io {
            action: "write",
            path: path.clone(),
            source,
        })
    }

    /// Returns the average number of bytes of text per token; `None` if unknown.
    pub fn bytes_per_token(&self) -> Option<f64> {
        (self.tokens > 0 && self.bytes > 0).then(|| self.bytes as f64 / self.tokens as f64)
    }
}
