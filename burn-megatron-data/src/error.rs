//! Errors of reading and sampling data.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

#[cfg(feature = "tokenizers")]
use super::chat::ChatDataError;
use super::gpt::{CacheError, SamplingError};
use super::hybrid_context::HybridContextError;
use super::indexed::IndexedDatasetError;
use crate::tokenizer::TokenizerError;
use burn_megatron::mesh::ContextSplitError;

/// The part of a text: training or held-out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TextPart {
    /// The training text.
    Training,
    /// The held-out text.
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

/// An error that occurred while data was read or sampled.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// The sequences cannot be split over the context axis.
    #[error(transparent)]
    Context(#[from] ContextSplitError),
    /// Hybrid context parallelism is impossible: the ranks of the context and data axes cannot share the documents.
    #[error(transparent)]
    HybridContext(#[from] HybridContextError),
    /// The path does not exist.
    #[error("no file or folder at '{path}'")]
    Missing {
        /// The path of the data.
        path: PathBuf,
    },
    /// The operating system failed to list or read the path.
    #[error("cannot read '{path}': {source}")]
    Unreadable {
        /// The file or folder that was read.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The path is a device, a socket or a pipe.
    #[error("'{path}' is neither a file nor a folder: give a text file or a folder of text files")]
    NotText {
        /// The path of the data.
        path: PathBuf,
    },
    /// No document has text.
    #[error("'{path}' has no text: {}", empty_documents(*documents))]
    Empty {
        /// The path of the data.
        path: PathBuf,
        /// The number of documents.
        documents: usize,
    },
    /// The folder contains no file that has one of the extensions.
    #[error(
        "no file in '{path}' ends in {extensions} (hidden folders and folders named \
         target, node_modules or runs are not searched)"
    )]
    NoMatchingFiles {
        /// The path of the data.
        path: PathBuf,
        /// The extensions as text, such as `.rs, .md`.
        extensions: String,
    },
    /// One part of the text has fewer bytes than a sample and its shifted targets need.
    #[error(
        "the {part} text of '{path}' has {bytes} bytes, but a sequence length of {seq} needs at \
         least {needed} bytes: give more text, or {}", fitting_length(*bytes)
    )]
    TooShort {
        /// The path of the data.
        path: PathBuf,
        /// The part that is too short.
        part: TextPart,
        /// The number of bytes of this part.
        bytes: usize,
        /// The requested sequence length.
        seq: usize,
        /// The number of bytes that a sample needs: the sequence length + 1.
        needed: usize,
    },
    /// One part of the text has fewer tokens than a sample and its shifted targets need.
    #[error(
        "the {part} text of '{path}' has {tokens} tokens, but a sequence length of {seq} needs at \
         least {needed} tokens: give more text, or {}", fitting_length(*tokens)
    )]
    TooFewTokens {
        /// The path of the data.
        path: PathBuf,
        /// The part that is too short.
        part: TextPart,
        /// The number of tokens of this part.
        tokens: usize,
        /// The requested sequence length.
        seq: usize,
        /// The number of tokens that a sample needs: the sequence length + 1.
        needed: usize,
    },
    /// The text cannot be tokenized.
    #[error("'{path}': {source}")]
    Tokenizer {
        /// The path of the data.
        path: PathBuf,
        /// The cause.
        source: TokenizerError,
    },
    /// The sequence length is 0.
    #[error("invalid sequence length 0: expected at least 1")]
    ZeroLength,
    /// A batch without samples was requested.
    #[error("invalid batch of 0 rows: expected at least 1")]
    NoRows,
    /// The samples of a batch have different lengths.
    #[error("row {row} of the batch has {length} tokens, but row 0 has {seq}")]
    UnequalRows {
        /// The index of the sample whose length differs.
        row: usize,
        /// The length of this sample in tokens.
        length: usize,
        /// The length of sample 0 in tokens.
        seq: usize,
    },
    /// Reading token files failed.
    #[error(transparent)]
    Indexed(#[from] IndexedDatasetError),
    /// Sampling from token files failed.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// Reading conversations failed.
    #[cfg(feature = "tokenizers")]
    #[error(transparent)]
    Chat(#[from] ChatDataError),
    /// Reading or writing cached indices failed.
    #[error(transparent)]
    IndexCache(#[from] CacheError),
    /// The prefetch thread could not be started.
    #[error("cannot start the prefetch thread: {0}")]
    Thread(io::Error),
    /// The prefetch thread returned no batch before the timeout.
    #[error("timed out after {} s waiting for the next batch: is the file system of the data available?", .0.as_secs())]
    Stalled(Duration),
}

fn empty_documents(count: usize) -> String {
    match count {
        0 => "it has no document".into(),
        1 => "its only document is empty".into(),
        count => format!("its {count} documents are empty"),
    }
}

fn fitting_length(bytes: usize) -> String {
    match bytes.saturating_sub(1) {
        0 => "another path, because no sequence length fits".to_string(),
        longest => format!("a sequence length of at most {longest}"),
    }
}
