//! The sidecar file of token files, which records how the token files were created.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::Tokenizer;
use burn_megatron::atomic_file::replace_file;
use burn_megatron::regular_file;

/// The maximum size of a sidecar, in bytes. Its longest part is the list of inputs.
const MAX_BYTES: u64 = 64 << 20;

/// Information about the token files `PREFIX.bin` and `PREFIX.idx`, which is stored in the sidecar file `PREFIX.json`.
///
/// Megatron does not write a sidecar file, and other programs may write a different file. Therefore any field may be
/// missing, and unknown fields are ignored. A field that is present must have the correct type.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TokenFileInfo {
    /// The [fingerprint](Tokenizer::fingerprint) of the tokenizer: `xxh3:` followed by 16 hexadecimal digits. It is
    /// equal for all token files that were created with the same tokenizer.
    pub tokenizer: Option<String>,
    /// The [name](Tokenizer::name) of the tokenizer: the path of the tokenizer when the token files were created.
    pub tokenizer_path: Option<String>,
    /// The [vocabulary size](Tokenizer::vocabulary) of the tokenizer.
    pub vocabulary: Option<usize>,
    /// The end-of-document token, or `None` if it is unknown.
    pub eod: Option<u32>,
    /// Whether the end-of-document token was appended to every document.
    pub eod_appended: bool,
    /// Whether the tokenizer added its special tokens to every document. `None` if it is unknown.
    pub special_tokens: Option<bool>,
    /// The number of documents.
    pub documents: u64,
    /// The number of tokens, including end-of-document tokens. It is 0 if the number is unknown.
    pub tokens: u64,
    /// The size of the documents as UTF-8 text, in bytes. It is 0 if the size is unknown.
    pub bytes: u64,
    /// The key of the text in the JSON objects of the input files.
    pub key: Option<String>,
    /// The paths of the input files from which the text was read.
    pub inputs: Vec<String>,
}

/// An error that occurred while a sidecar file was read or written.
#[derive(Debug, thiserror::Error)]
pub enum TokenFileInfoError {
    /// A file system operation failed.
    #[error("cannot {action} '{path}': {source}")]
    Io {
        /// The operation that failed, as a verb.
        action: &'static str,
        /// The path of the file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file is not a valid sidecar file.
    #[error("'{path}' does not describe token files: {source}")]
    Invalid {
        /// The path of the file.
        path: PathBuf,
        /// The error of the JSON parser.
        source: serde_json::Error,
    },
}

impl TokenFileInfo {
    /// Creates the information about token files that `tokenizer` will create, before any text is tokenized.
    pub fn new(tokenizer: &Tokenizer) -> Self {
        Self {
            tokenizer: Some(format!("xxh3:{:016x}", tokenizer.fingerprint())),
            tokenizer_path: Some(tokenizer.name().into()),
            vocabulary: Some(tokenizer.vocabulary()),
            eod: tokenizer.eod(),
            ..Self::default()
        }
    }

    /// Returns whether the token files were created with `tokenizer`. Also returns true if the tokenizer of the files
    /// is unknown.
    pub fn is_of(&self, tokenizer: &Tokenizer) -> bool {
        self.tokenizer.is_none() || self.tokenizer == Self::new(tokenizer).tokenizer
    }

    /// Returns the path of the sidecar file: `PREFIX.json`.
    pub fn path(prefix: &Path) -> PathBuf {
        let mut path = prefix.as_os_str().to_os_string();
        path.push(".json");
        path.into()
    }

    /// Parses the content of a sidecar file.
    ///
    /// # Errors
    ///
    /// The error of the JSON parser.
    pub fn parse(content: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(content)
    }

    /// Reads the sidecar file of a path prefix. Returns `None` if the file does not exist.
    ///
    /// # Errors
    ///
    /// [`TokenFileInfoError`] if the file cannot be read or is invalid.
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

    /// Serializes the information to the content of a sidecar file.
    ///
    /// # Errors
    ///
    /// The error of the JSON serializer.
    pub fn to_bytes(&self) -> Result<Vec<u8>, serde_json::Error> {
        let mut text = serde_json::to_vec_pretty(self)?;
        text.push(b'\n');
        Ok(text)
    }

    /// Writes the sidecar file of a path prefix atomically.
    ///
    /// # Errors
    ///
    /// [`TokenFileInfoError::Io`] if the file cannot be written.
    pub fn write(&self, prefix: &Path) -> Result<(), TokenFileInfoError> {
        let path = Self::path(prefix);
        let write = || replace_file(&path, &self.to_bytes()?);
        write().map_err(|source| TokenFileInfoError::Io {
            action: "write",
            path: path.clone(),
            source,
        })
    }

    /// Returns the average number of bytes of text per token, or `None` if it is unknown.
    pub fn bytes_per_token(&self) -> Option<f64> {
        (self.tokens > 0 && self.bytes > 0).then(|| self.bytes as f64 / self.tokens as f64)
    }
}
