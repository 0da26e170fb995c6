//! Errors of preprocessing.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use burn_megatron::data::DataError;
use burn_megatron::data::indexed::IndexedDatasetError;
use burn_megatron::tokenizer::TokenizerError;

/// An error that ends preprocessing.
#[derive(Debug, thiserror::Error)]
pub enum PreprocessError {
    /// A setting has no effect.
    #[error("{0}")]
    Ignored(&'static str),
    /// A folder has no file to read.
    #[error(
        "no file in '{}' ends in {extensions}, optionally followed by .gz or .zst; see --extensions",
        path.display()
    )]
    NoFiles {
        /// The folder.
        path: PathBuf,
        /// What was looked for.
        extensions: String,
    },
    /// The file system, or a compressed file that is truncated.
    #[error("cannot {action} '{path}': {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: String,
        /// Why not.
        source: io::Error,
    },
    /// The output exists.
    #[error("'{}' exists already; --overwrite replaces it", .0.display())]
    Exists(PathBuf),
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
    /// A document is bad.
    #[error("{place}: {source}; --skip-bad skips such documents")]
    Bad {
        /// Its position.
        place: DocumentPosition,
        /// What is wrong with it.
        source: BadDocument,
    },
    /// No document has a token.
    #[error("the inputs have no document with a token: {0}")]
    NoDocuments(String),
    /// The threads could not be started.
    #[error("cannot start the threads: {0}; try a smaller --workers")]
    Threads(io::Error),
    /// A worker died.
    #[error("a worker has failed; nothing was written")]
    Worker,
    /// Ctrl-C.
    #[error("interrupted; nothing was written")]
    Interrupted,
    /// The tokenizer.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// Listing a folder.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The token files.
    #[error(transparent)]
    Indexed(#[from] IndexedDatasetError),
}

/// An error in a document.
#[derive(Debug, thiserror::Error)]
pub enum BadDocument {
    /// Not a JSON object.
    #[error("not a JSON object: {0}")]
    Json(serde_json::Error),
    /// A key is missing.
    #[error("the object has no `{0}`")]
    MissingKey(String),
    /// The value of a key is not a string.
    #[error("the value of `{0}` is not a string")]
    NoText(String),
    /// The document is too long.
    #[error(
        "the document has more than {0} bytes (see --max-document-bytes; --lines and --separator split a \
         file into documents)"
    )]
    TooLong(usize),
    /// The tokenizer failed.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

/// The position of a document.
#[derive(Clone, Debug)]
pub struct DocumentPosition {
    /// The input.
    pub file: Arc<str>,
    /// Its line, or its number where documents are not lines; from 1.
    pub number: u64,
    /// What `number` counts.
    pub unit: PositionUnit,
}

/// What the number of a position counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PositionUnit {
    /// Lines.
    Line,
    /// Documents.
    Document,
    /// The file is one document.
    File,
}

impl fmt::Display for DocumentPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.unit {
            PositionUnit::Line => write!(f, "{}:{}", self.file, self.number),
            PositionUnit::Document => write!(f, "{}, document {}", self.file, self.number),
            PositionUnit::File => f.write_str(&self.file),
        }
    }
}
