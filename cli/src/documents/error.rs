//! Errors of finding and reading documents.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn_megatron_data::DataError;
use burn_megatron_data::tokenizer::TokenizerError;

use super::counts::FileCounts;

/// Error for an input that cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum InputError {
    /// A folder contains no file to read.
    #[error(
        "no file in '{}' ends in {extensions}, optionally followed by .gz or .zst{}; see --extensions",
        path.display(), counts.left_out().map(|kinds| format!(": there are {kinds}")).unwrap_or_default()
    )]
    NoFiles {
        /// The folder.
        path: PathBuf,
        /// The extensions that were searched for.
        extensions: String,
        /// The files that were found.
        counts: FileCounts,
    },
    /// The file system returned an error, or a compressed file is truncated.
    #[error("cannot {action} '{path}': {source}")]
    Io {
        /// The action that failed.
        action: &'static str,
        /// The file.
        path: String,
        /// The cause.
        source: io::Error,
    },
    /// The first bytes belong to another kind of file.
    #[error("'{path}' is {kind}, not text: {advice}")]
    NotText {
        /// The file.
        path: String,
        /// The kind of file.
        kind: &'static str,
        /// A way to convert the file to text.
        advice: String,
    },
    /// The feature that reads this kind of file is disabled.
    #[cfg(not(feature = "parquet"))]
    #[error(
        "'{path}' is {kind}, and this binary was built without the feature parquet: build it with \
         `cargo install --path cli --features parquet`, or convert the file with `python -c \"{python}\"`"
    )]
    NotBuilt {
        /// The file.
        path: String,
        /// The kind of file.
        kind: &'static str,
        /// A Python program that converts the file.
        python: String,
    },
    /// A table has no text column of this name.
    #[cfg(feature = "parquet")]
    #[error("'{path}' has no column of text `{key}` (see --json-key): its columns are {columns}")]
    Column {
        /// The file.
        path: String,
        /// The name of the column.
        key: String,
        /// The columns with their types.
        columns: String,
    },
    /// A dataset folder has several splits, and none is named train.
    #[error(
        "'{}' has the splits {splits}, and none is named train: give the folder or a file of one of them",
        path.display()
    )]
    Splits {
        /// The folder.
        path: PathBuf,
        /// The names of the splits.
        splits: String,
    },
    /// A folder cannot be listed.
    #[error(transparent)]
    Data(#[from] DataError),
}

impl InputError {
    /// Returns an error of the file system.
    pub fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io {
            action,
            path: path.display().to_string(),
            source,
        }
    }
}

/// Error in a document.
#[derive(Debug, thiserror::Error)]
pub enum BadDocument {
    /// The document is not a JSON object.
    #[error("not a JSON object: {0}; each line must be one (`jq -c '.[]'` makes lines of a list)")]
    Json(serde_json::Error),
    /// A key is missing.
    #[error("the object has no `{key}`{}", its_keys(keys))]
    MissingKey {
        /// The key.
        key: String,
        /// The keys that the object has.
        keys: Vec<String>,
    },
    /// The value of a key is not a string.
    #[error("the value of `{0}` is not a string")]
    NoText(String),
    /// The text is not UTF-8.
    #[error(
        "the text is not UTF-8 from byte {0} on; `iconv -f LATIN1 -t UTF-8` converts Latin-1 text"
    )]
    NotUtf8(usize),
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

/// Lists the keys of an object, so that the user can choose another key.
fn its_keys(keys: &[String]) -> String {
    const SHOWN: usize = 12;
    let names: Vec<_> = keys
        .iter()
        .take(SHOWN)
        .map(|key| format!("`{key}`"))
        .collect();
    let more = if keys.len() > SHOWN { ", ..." } else { "" };
    match keys {
        [] => String::new(),
        [_] => format!(", only {} (see --json-key)", names[0]),
        _ => format!(", but {}{more} (see --json-key)", names.join(", ")),
    }
}

/// Position of a document.
#[derive(Clone, Debug)]
pub struct DocumentPosition {
    /// The name of the input.
    pub file: Arc<str>,
    /// The line, or the number of the document if documents are not lines; from 1.
    pub number: u64,
    /// The unit of `number`.
    pub unit: PositionUnit,
}

/// Unit of the number of a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PositionUnit {
    /// Lines.
    Line,
    /// Rows of a table.
    Row,
    /// Documents in a file.
    Document,
    /// The file is one document.
    File,
}

impl fmt::Display for DocumentPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.unit {
            PositionUnit::Line => write!(f, "{}:{}", self.file, self.number),
            PositionUnit::Row => write!(f, "{}, row {}", self.file, self.number),
            PositionUnit::Document => write!(f, "{}, document {}", self.file, self.number),
            PositionUnit::File => f.write_str(&self.file),
        }
    }
}
