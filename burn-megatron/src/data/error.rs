//! What can be wrong with data.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use super::gpt::{CacheError, SamplingError};
use super::indexed::IndexedError;
use crate::tokenizer::TokenizerError;

/// One of the two parts that a text is split into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TextPart {
    /// The text that windows are sampled from.
    Training,
    /// The text that the model never trains on.
    HeldOut,
}

impl fmt::Display for TextPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TextPart::Training => "training",
            TextPart::HeldOut => "held-out",
        })
    }
}

/// Why data cannot be read or sampled.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// There is nothing at the path.
    #[error("no file or folder at '{path}'")]
    Missing {
        /// The path as it was given.
        path: PathBuf,
    },
    /// The operating system refused to list or read the path.
    #[error("cannot read '{path}': {source}")]
    Unreadable {
        /// The file or folder that was being read.
        path: PathBuf,
        /// The reason the operating system gives.
        source: io::Error,
    },
    /// The path is a device, a socket or a pipe.
    #[error("'{path}' is neither a file nor a folder: give a text file or a folder of text files")]
    NotText {
        /// The path as it was given.
        path: PathBuf,
    },
    /// The file has no bytes, or every matching file of the folder has none.
    #[error("'{path}' holds no text: {files} file(s), 0 bytes")]
    Empty {
        /// The path as it was given.
        path: PathBuf,
        /// How many files were looked at.
        files: usize,
    },
    /// The folder holds no file with one of the extensions.
    #[error(
        "no file in '{path}' ends in {extensions} (hidden folders and folders named \
         target, node_modules or runs are not searched)"
    )]
    NoMatchingFiles {
        /// The path as it was given.
        path: PathBuf,
        /// The extensions that were looked for, as `.rs, .md`.
        extensions: String,
    },
    /// One part of the text is shorter than a window and its shifted targets.
    #[error(
        "the {part} text of '{path}' has {bytes} bytes, but a sequence length of {seq} needs at \
         least {needed} bytes: give more text, or {}", fitting_length(*bytes)
    )]
    TooShort {
        /// The path as it was given.
        path: PathBuf,
        /// The part that is too short.
        part: TextPart,
        /// The bytes this part has.
        bytes: usize,
        /// The sequence length that was asked for.
        seq: usize,
        /// The bytes a window of this length needs, one more than the length.
        needed: usize,
    },
    /// One part of a text has fewer tokens than a window and its shifted targets.
    #[error(
        "the {part} text of '{path}' has {tokens} tokens, but a sequence length of {seq} needs at \
         least {needed} tokens: give more text, or {}", fitting_length(*tokens)
    )]
    TooFewTokens {
        /// The path as it was given.
        path: PathBuf,
        /// The part that is too short.
        part: TextPart,
        /// The tokens this part has.
        tokens: usize,
        /// The sequence length that was asked for.
        seq: usize,
        /// The tokens a window of this length needs, one more than the length.
        needed: usize,
    },
    /// The text cannot be made tokens of.
    #[error("'{path}': {source}")]
    Tokenizer {
        /// The path as it was given.
        path: PathBuf,
        /// Why not.
        source: TokenizerError,
    },
    /// The sequence length is 0.
    #[error("a sequence length of 0 holds no token: give at least 1")]
    ZeroLength,
    /// A batch of no rows was asked for.
    #[error("a batch of 0 rows holds no token: give at least 1 window")]
    NoRows,
    /// The windows of a batch have different lengths.
    #[error("row {row} of the batch has {length} tokens, but row 0 has {seq}")]
    UnequalRows {
        /// The number of the row that differs.
        row: usize,
        /// Its length in tokens.
        length: usize,
        /// The length of row 0 in tokens.
        seq: usize,
    },
    /// Token files.
    #[error(transparent)]
    Indexed(#[from] IndexedError),
    /// The way samples are taken from them.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// Where their indices are kept.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// Nobody can read ahead.
    #[error("cannot start a thread that reads ahead: {0}")]
    Thread(io::Error),
    /// Whoever reads ahead does not come to an end.
    #[error("waited {} s for the next batch; is the file system of the data still there?", .0.as_secs())]
    Stalled(Duration),
}

fn fitting_length(bytes: usize) -> String {
    match bytes.saturating_sub(1) {
        0 => "another path, as no sequence length fits".to_string(),
        longest => format!("a sequence length of at most {longest}"),
    }
}
