//! Rows of Parquet and Arrow files. Only the requested text columns are read.
//!
//! One page of a column, or one batch of rows, is in memory at a time. Requires the feature `parquet`. Without it,
//! such files cause an error.

#[cfg(feature = "parquet")]
mod arrow;
#[cfg(feature = "parquet")]
mod parquet;

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::error::InputError;

/// Format of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableFormat {
    /// A Parquet file.
    Parquet,
    /// An Arrow file. Feather files have this format too.
    ArrowFile,
    /// An Arrow stream. `datasets` writes this format.
    ArrowStream,
}

impl TableFormat {
    /// Returns the name of the format.
    pub fn name(self) -> &'static str {
        match self {
            Self::Parquet => "Parquet",
            Self::ArrowFile | Self::ArrowStream => "Arrow",
        }
    }
}

/// The texts of a row, one per key. A null value is `None`.
pub type Row = Vec<Option<Vec<u8>>>;

/// Iterator over the rows of a table, in order.
pub type Rows = Box<dyn Iterator<Item = io::Result<Row>> + Send>;

/// Opens a table, and returns the columns `keys` of its rows. `read` counts the bytes of the file that were read.
///
/// # Errors
/// Returns [`InputError::Io`] or [`InputError::Column`].
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

/// Returns an error that explains how to build with table support.
///
/// # Errors
/// Always returns [`InputError::NotBuilt`].
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
