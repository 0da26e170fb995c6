//! Errors of preprocessing.

use std::io;
use std::path::PathBuf;

use burn_megatron::checkpoint::CheckpointError;
use burn_megatron_data::indexed::IndexedDatasetError;
use burn_megatron_data::tokenizer::TokenizerError;

use crate::documents::{BadDocument, DocumentPosition, InputError};

/// Error that ends preprocessing.
#[derive(Debug, thiserror::Error)]
pub enum PreprocessError {
    /// A flag has no effect.
    #[error("{0}")]
    Ignored(&'static str),
    /// An input cannot be read.
    #[error(transparent)]
    Input(#[from] InputError),
    /// The output exists.
    #[error("'{}' exists already; --overwrite replaces it", .0.display())]
    Exists(PathBuf),
    /// The output is in a checkpoint or in the folder of an active run.
    #[error(transparent)]
    Place(#[from] CheckpointError),
    /// An input is also an output.
    #[error("'{}' is both an input and an output", .0.display())]
    InputIsOutput(PathBuf),
    /// The separator is empty.
    #[error("invalid --separator \"\": expected a text, such as '\\n\\n'")]
    EmptySeparator,
    /// A key is given twice.
    #[error("--json-key `{0}` is given twice")]
    KeyTwice(String),
    /// A key cannot be part of a file name.
    #[error("--json-key `{0}` cannot be part of a file name; rename it in the input")]
    KeyName(String),
    /// The tokenizer has no token for the end of a document.
    #[error(
        "the tokenizer {0} does not define the token that ends a document: set it with --eod, or remove --append-eod"
    )]
    NoEod(String),
    /// A document is invalid.
    #[error("{place}: {source}; --skip-bad skips such documents")]
    Bad {
        /// The position of the document.
        place: DocumentPosition,
        /// The fault of the document.
        source: BadDocument,
    },
    /// No document has a token.
    #[error("the inputs have no document with a token: {0}")]
    NoDocuments(String),
    /// The threads could not be started.
    #[error("cannot start the threads: {0}; try a smaller --workers")]
    Threads(io::Error),
    /// A worker thread died.
    #[error("a worker has failed; nothing was written")]
    Worker,
    /// The user pressed Ctrl-C.
    #[error("interrupted; nothing was written")]
    Interrupted,
    /// The tokenizer returned an error.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// Reading or writing token files failed.
    #[error(transparent)]
    Indexed(#[from] IndexedDatasetError),
}
