//! Why preprocessing ends, or leaves a document out.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use burn_megatron::data::DataError;
use burn_megatron::data::indexed::IndexedError;
use burn_megatron::tokenizer::TokenizerError;

/// Why preprocessing ends.
#[derive(Debug, thiserror::Error)]
pub enum PreprocessError {
    /// A setting without effect.
    #[error("{0}")]
    Ignored(&'static str),
    /// Nothing to read.
    #[error(
        "no file in '{}' ends in {extensions}, also followed by .gz or .zst; --extensions names others",
        path.display()
    )]
    NoFiles {
        /// The folder.
        path: PathBuf,
        /// What was looked for.
        extensions: String,
    },
    /// The file system, or a packed file that is not whole.
    #[error("cannot {action} '{path}': {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: String,
        /// Why not.
        source: io::Error,
    },
    /// There are files of that name.
    #[error("'{}' is there already; --overwrite takes its place", .0.display())]
    Exists(PathBuf),
    /// An input that would be written to.
    #[error("'{}' is an input and would be written to", .0.display())]
    InputIsOutput(PathBuf),
    /// A separator that separates nothing.
    #[error("an empty --separator stands everywhere; give a text, such as '\\n\\n'")]
    EmptySeparator,
    /// Two keys whose files would have one name.
    #[error("--json-key has `{0}` twice")]
    KeyTwice(String),
    /// A key that is no part of a file name.
    #[error("--json-key `{0}` cannot be a part of a file name; rename it in the input")]
    KeyName(String),
    /// The end of a document is not known.
    #[error(
        "the tokenizer {0} does not say which token ends a document: name it with --eod, or leave \
         --append-eod out"
    )]
    NoEod(String),
    /// A document that is none.
    #[error("{place}: {source}; --skip-bad leaves such documents out")]
    Bad {
        /// Where it stands.
        place: Place,
        /// What is wrong with it.
        source: BadDocument,
    },
    /// There was nothing to write.
    #[error("the inputs have no document with a token: {0}")]
    NoDocuments(String),
    /// The system gives no more threads.
    #[error("the threads could not be started: {0}; a smaller --workers may help")]
    Threads(io::Error),
    /// A thread that ended too soon.
    #[error("a worker has failed; nothing was written")]
    Worker,
    /// Ctrl-C.
    #[error("interrupted; nothing was written")]
    Interrupted,
    /// The tokenizer.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The folders.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The token files.
    #[error(transparent)]
    Indexed(#[from] IndexedError),
}

/// What is wrong with a document.
#[derive(Debug, thiserror::Error)]
pub enum BadDocument {
    /// Not JSON, or no object.
    #[error("no JSON object: {0}")]
    Json(serde_json::Error),
    /// A key that is not there.
    #[error("the object has no `{0}`")]
    MissingKey(String),
    /// A key with something else.
    #[error("the value of `{0}` is no string")]
    NoText(String),
    /// Too many bytes.
    #[error(
        "the document has more than {0} bytes (see --max-document-bytes; --lines and --separator cut a \
         file into documents)"
    )]
    TooLong(usize),
    /// The tokenizer cannot read it.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

/// Where a document stands.
#[derive(Clone, Debug)]
pub struct Place {
    /// The input.
    pub file: Arc<str>,
    /// Its line, from 1, or which document it is where documents are no lines.
    pub number: u64,
    /// What is counted.
    pub unit: Unit,
}

/// What a place counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Lines.
    Line,
    /// What a separator ends.
    Document,
    /// The file is one document.
    File,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.unit {
            Unit::Line => write!(f, "{}:{}", self.file, self.number),
            Unit::Document => write!(f, "{}, document {}", self.file, self.number),
            Unit::File => f.write_str(&self.file),
        }
    }
}
