//! The rows of Parquet and Arrow files, of which only the columns of text are read.
//!
//! One page of a column, or one batch of rows, is in memory at a time. With the feature `parquet`; without it such files
//! are errors.

#[cfg(feature = "parquet")]
mod arrow;
#[cfg(feature = "parquet")]
mod parquet;

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::error::InputError;

/// The format of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableFormat {
    /// Parquet.
    Parquet,
    /// An Arrow file, which Feather is too.
    ArrowFile,
    /// A stream of Arrow, as `datasets` writes it.
    ArrowStream,
}

impl TableFormat {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Parquet => "Parquet",
            Self::ArrowFile | Self::ArrowStream => "Arrow",
        }
    }
}

/// The texts of a row, one for each key, where it is not null.
pub type Row = Vec<Option<Vec<u8>>>;

/// The rows of a table, in order.
pub type Rows = Box<dyn Iterator<Item = io::Result<Row>> + Send>;

/// Opens a table, and reads the columns `keys` of its rows; `read` counts bytes of the file.
///
/// # Errors
/// [`InputError::Io`], [`InputError::Column`].
#[cfg(feature = "parquet")]
pub fn open(
    path: &Path,
    format: TableFormat,
    keys: &[String],
    read: &Arc<AtomicU64>,
) -> Result<Rows, InputError> {
    Ok(match format {
        TableFormat::Parquet => Box::new(parquet::ParquetRows::open(path, keys, read)?),
        TableFormat::ArrowFile => Box::new(arrow::ArrowRows::open_file(path, keys, read)?),
        TableFormat::ArrowStream => Box::new(arrow::ArrowRows::open_stream(path, keys, read)?),
    })
}

/// An error that tells how to build what reads tables.
///
/// # Errors
/// Always [`InputError::NotBuilt`].
#[cfg(not(feature = "parquet"))]
pub fn open(
    path: &Path,
    format: TableFormat,
    _keys: &[String],
    _read: &Arc<AtomicU64>,
) -> Result<Rows, InputError> {
    let path = path.display();
    let python = match format {
        TableFormat::Parquet => format!(
            "import pandas; pandas.read_parquet('{path}').to_json('{path}.jsonl', orient='records', lines=True)"
        ),
        TableFormat::ArrowFile => format!(
            "import pandas; pandas.read_feather('{path}').to_json('{path}.jsonl', orient='records', lines=True)"
        ),
        TableFormat::ArrowStream => {
            format!("import datasets; datasets.Dataset.from_file('{path}').to_json('{path}.jsonl')")
        }
    };
    Err(InputError::NotBuilt {
        path: path.to_string(),
        kind: format.name(),
        python,
    })
}
