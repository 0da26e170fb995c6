//! Errors of tokenizers.

use std::io;
use std::path::{Path, PathBuf};

/// An error of the tokenizers library.
pub(super) type BoxedError = Box<dyn std::error::Error + Send + Sync>;

/// An error that occurred while a tokenizer was read or used.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// The file does not exist.
    #[error("no tokenizer at '{path}': give a tokenizer.json, a folder that has one, or `bytes`")]
    Missing {
        /// The path of the expected file.
        path: PathBuf,
    },
    /// The operating system failed to read the file.
    #[error("cannot read '{path}': {source}")]
    Unreadable {
        /// The path of the file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file does not contain a valid tokenizer.
    #[error("'{path}' does not describe a tokenizer: {source}")]
    Invalid {
        /// The path of the file.
        path: PathBuf,
        /// The reason.
        source: BoxedError,
    },
    /// The program was built without the feature `tokenizers`, which is required to read the file.
    #[error(
        "cannot read '{path}': this program was built without tokenizers; build it with --features tokenizers, or \
         give `bytes`"
    )]
    NotBuilt {
        /// The path of the file.
        path: PathBuf,
    },
    /// The `tokenizers` library panicked while it parsed the file.
    #[error("'{path}' does not describe a tokenizer: its parts contradict each other")]
    Panicked {
        /// The path of the file.
        path: PathBuf,
    },
    /// A file of the tokenizer refers to a token that is not in the vocabulary.
    #[error("'{path}' has the {what} `{token}`, which is not in the vocabulary")]
    UnknownToken {
        /// The path of the file.
        path: PathBuf,
        /// The role of the token, such as `eos_token`.
        what: &'static str,
        /// The token as text, or its id.
        token: String,
    },
    /// A requested token is not in the vocabulary.
    #[error("the tokenizer {tokenizer} has no token `{token}`{}", listed(special))]
    NoSuchToken {
        /// The name of the tokenizer.
        tokenizer: String,
        /// The requested token.
        token: String,
        /// Some special tokens of the tokenizer.
        special: Vec<String>,
    },
    /// The text is not UTF-8.
    #[error("the text is not UTF-8 from byte {0} on")]
    NotUtf8(usize),
    /// The text cannot be encoded.
    #[error("the tokenizer {tokenizer} cannot encode the text: {source}")]
    Encode {
        /// The name of the tokenizer.
        tokenizer: String,
        /// The error of the `tokenizers` library.
        source: BoxedError,
    },
    /// The tokens cannot be decoded.
    #[error("the tokenizer {tokenizer} cannot decode the tokens: {source}")]
    Decode {
        /// The name of the tokenizer.
        tokenizer: String,
        /// The error of the `tokenizers` library.
        source: BoxedError,
    },
}

impl TokenizerError {
    pub(super) fn unreadable(path: &Path, source: io::Error) -> Self {
        let path = path.to_path_buf();
        Self::Unreadable { path, source }
    }

    pub(super) fn invalid(path: &Path, source: impl Into<BoxedError>) -> Self {
        let (path, source) = (path.to_path_buf(), source.into());
        Self::Invalid { path, source }
    }
}

fn listed(special: &[String]) -> String {
    if special.is_empty() {
        String::new()
    } else {
        format!("; its special tokens are {}", special.join(", "))
    }
}
