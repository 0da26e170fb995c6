//! Why a tokenizer cannot be read or used.

use std::io;
use std::path::{Path, PathBuf};

/// What the library of tokenizers fails with.
type Source = Box<dyn std::error::Error + Send + Sync>;

/// Why a tokenizer cannot be read or used.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// There is no such file, or the folder has none.
    #[error("no tokenizer at '{path}': give a tokenizer.json, a folder that has one, or `bytes`")]
    Missing {
        /// The file that was looked for.
        path: PathBuf,
    },
    /// The operating system refused.
    #[error("cannot read '{path}': {source}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The reason the operating system gives.
        source: io::Error,
    },
    /// The file is none of its kind.
    #[error("'{path}' does not describe a tokenizer: {source}")]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: Source,
    },
    /// The file is so wrong that its reader gave up.
    #[error("'{path}' does not describe a tokenizer: parts of it contradict each other")]
    Panicked {
        /// The file.
        path: PathBuf,
    },
    /// A file names a token that the vocabulary does not have.
    #[error("'{path}' has the {what} `{token}`, which is no token of the vocabulary")]
    UnknownToken {
        /// The file.
        path: PathBuf,
        /// What the token is, such as `eos_token`.
        what: &'static str,
        /// The token, or its number.
        token: String,
    },
    /// A token that was asked for.
    #[error("the tokenizer {tokenizer} has no token `{token}`{}", listed(special))]
    NoSuchToken {
        /// The tokenizer.
        tokenizer: String,
        /// The token as it would be written.
        token: String,
        /// Its special tokens, the first of them.
        special: Vec<String>,
    },
    /// A text that is not UTF-8.
    #[error("the text is not UTF-8 from byte {0} on")]
    NotUtf8(usize),
    /// A text that has no tokens.
    #[error("the tokenizer {tokenizer} has no tokens for a text: {source}")]
    Encode {
        /// The tokenizer.
        tokenizer: String,
        /// What the library says.
        source: Source,
    },
    /// Tokens that have no text.
    #[error("the tokenizer {tokenizer} has no text for some tokens: {source}")]
    Decode {
        /// The tokenizer.
        tokenizer: String,
        /// What the library says.
        source: Source,
    },
}

impl TokenizerError {
    pub(super) fn unreadable(path: &Path, source: io::Error) -> Self {
        let path = path.to_path_buf();
        Self::Unreadable { path, source }
    }

    pub(super) fn invalid(path: &Path, source: impl Into<Source>) -> Self {
        let (path, source) = (path.to_path_buf(), source.into());
        Self::Invalid { path, source }
    }
}

fn listed(special: &[String]) -> String {
    match special.is_empty() {
        true => String::new(),
        false => format!("; its special tokens are {}", special.join(", ")),
    }
}
