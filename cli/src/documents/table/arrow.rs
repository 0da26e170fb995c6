//! Rows of an Arrow file or stream.

use std::fs::File;
use std::io::{self, BufReader};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use arrow_array::cast::AsArray;
use arrow_array::{Array, RecordBatch};
use arrow_ipc::reader::{FileReader, StreamReader};
use arrow_schema::{ArrowError, DataType, Schema};
use burn_megatron::regular_file;

use super::Row;
use crate::documents::counting_reader::CountingReader;
use crate::documents::error::InputError;

type Batches = Box<dyn Iterator<Item = Result<RecordBatch, ArrowError>> + Send>;

/// Iterator over the rows of an Arrow file, batch by batch.
pub struct ArrowRows {
    batches: Batches,
    /// The column index of each key.
    columns: Vec<usize>,
    /// The current batch and its next row.
    batch: Option<(RecordBatch, usize)>,
}

impl ArrowRows {
    /// Opens an Arrow file, which has an index at its end, and reads its schema.
    pub fn open_file(
        path: &Path,
        keys: &[String],
        read: &Arc<AtomicU64>,
    ) -> Result<Self, InputError> {
        let file = FileReader::try_new(open(path, read)?, None);
        let file = file.map_err(|error| InputError::io("read", path, io_error(error)))?;
        let schema = file.schema();
        Self::new(path, Box::new(file), &schema, keys)
    }

    /// Opens an Arrow stream, and reads its schema.
    pub fn open_stream(
        path: &Path,
        keys: &[String],
        read: &Arc<AtomicU64>,
    ) -> Result<Self, InputError> {
        let stream = StreamReader::try_new(open(path, read)?, None);
        let stream = stream.map_err(|error| InputError::io("read", path, io_error(error)))?;
        let schema = stream.schema();
        Self::new(path, Box::new(stream), &schema, keys)
    }

    fn new(
        path: &Path,
        batches: Batches,
        schema: &Schema,
        keys: &[String],
    ) -> Result<Self, InputError> {
        let columns = keys.iter().map(|key| {
            column(schema, key).ok_or_else(|| InputError::Column {
                path: path.display().to_string(),
                key: key.clone(),
                columns: describe(schema),
            })
        });
        Ok(Self {
            batches,
            columns: columns.collect::<Result<_, _>>()?,
            batch: None,
        })
    }

    fn row(&mut self) -> Result<Option<Row>, ArrowError> {
        loop {
            if let Some((batch, row)) = &mut self.batch
                && *row < batch.num_rows()
            {
                let columns = self.columns.iter().map(|column| batch.column(*column));
                let texts = columns.map(|column| text(column, *row)).collect();
                *row += 1;
                return Ok(Some(texts));
            }
            match self.batches.next().transpose()? {
                Some(batch) => self.batch = Some((batch, 0)),
                None => return Ok(None),
            }
        }
    }
}

impl Iterator for ArrowRows {
    type Item = io::Result<Row>;

    fn next(&mut self) -> Option<Self::Item> {
        self.row().map_err(io_error).transpose()
    }
}

fn open(path: &Path, read: &Arc<AtomicU64>) -> Result<BufReader<CountingReader<File>>, InputError> {
    let from = regular_file::open(path).map_err(|source| InputError::io("read", path, source))?;
    let read = Arc::clone(read);
    Ok(BufReader::new(CountingReader { from, read }))
}

/// Returns the text of a row, or `None` if it is null.
fn text(column: &dyn Array, row: usize) -> Option<Vec<u8>> {
    if column.is_null(row) {
        return None;
    }
    let text = match column.data_type() {
        DataType::Utf8 => column.as_string::<i32>().value(row),
        DataType::LargeUtf8 => column.as_string::<i64>().value(row),
        _ => column.as_string_view().value(row),
    };
    Some(text.as_bytes().to_vec())
}

/// Returns the index of the text column of this name.
fn column(schema: &Schema, key: &str) -> Option<usize> {
    let (column, field) = schema.column_with_name(key)?;
    let texts = [DataType::Utf8, DataType::LargeUtf8, DataType::Utf8View];
    texts.contains(field.data_type()).then_some(column)
}

/// Lists the names of the columns.
fn describe(schema: &Schema) -> String {
    let columns = schema.fields().iter();
    let names: Vec<_> = columns
        .map(|column| format!("`{}`", column.name()))
        .collect();
    names.join(", ")
}

fn io_error(error: ArrowError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}
