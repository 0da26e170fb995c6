//! Rows of a Parquet file.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn_megatron::regular_file;
use parquet::basic::{LogicalType, Type};
use parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use parquet::data_type::ByteArrayType;
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::schema::types::{ColumnDescriptor, SchemaDescriptor};

use super::Row;
use crate::documents::error::InputError;

/// The number of rows that are decoded at once.
const ROWS: usize = 64;

/// Iterator over the rows of a Parquet file, row group by row group.
pub struct ParquetRows {
    file: SerializedFileReader<File>,
    /// The column index of each key.
    columns: Vec<usize>,
    /// The row group to open next.
    group: usize,
    /// The column readers of the current row group. Empty before the first group and after the last.
    readers: Vec<ColumnReaderImpl<ByteArrayType>>,
    decoded: VecDeque<Row>,
    read: Arc<AtomicU64>,
}

impl ParquetRows {
    /// Opens a file, and reads its schema.
    pub fn open(path: &Path, keys: &[String], read: &Arc<AtomicU64>) -> Result<Self, InputError> {
        let failed = |source| InputError::io("read", path, source);
        let file = regular_file::open(path).map_err(failed)?;
        let file = SerializedFileReader::new(file).map_err(|error| failed(io_error(error)))?;
        let schema = file.metadata().file_metadata().schema_descr();
        let columns = keys.iter().map(|key| {
            column(schema, key).ok_or_else(|| InputError::Column {
                path: path.display().to_string(),
                key: key.clone(),
                columns: describe(schema),
            })
        });
        Ok(Self {
            columns: columns.collect::<Result<_, _>>()?,
            file,
            group: 0,
            readers: vec![],
            decoded: VecDeque::new(),
            read: Arc::clone(read),
        })
    }

    /// Decodes the next rows. If it decodes none, there are no more rows.
    fn decode(&mut self) -> Result<(), ParquetError> {
        while self.decoded.is_empty() {
            if self.readers.is_empty() {
                if self.group == self.file.num_row_groups() {
                    return Ok(());
                }
                self.open_group()?;
            }
            let columns = self.readers.iter_mut().map(texts);
            let columns: Vec<_> = columns.collect::<Result<_, _>>()?;
            let rows = columns.first().map_or(0, Vec::len);
            if columns.iter().any(|column| column.len() != rows) {
                return Err(ParquetError::General(
                    "the columns of a row group differ in length".into(),
                ));
            }
            if rows == 0 {
                self.readers.clear();
            }
            let mut columns: Vec<_> = columns.into_iter().map(Vec::into_iter).collect();
            let row = |_| columns.iter_mut().filter_map(Iterator::next).collect();
            self.decoded = (0..rows).map(row).collect();
        }
        Ok(())
    }

    fn open_group(&mut self) -> Result<(), ParquetError> {
        let group = self.file.get_row_group(self.group)?;
        for column in &self.columns {
            match group.get_column_reader(*column)? {
                ColumnReader::ByteArrayColumnReader(reader) => self.readers.push(reader),
                _ => return Err(ParquetError::General("a column is not of texts".into())),
            }
        }
        let bytes = group.metadata().compressed_size();
        let bytes = u64::try_from(bytes).unwrap_or_default();
        self.read.fetch_add(bytes, Ordering::Relaxed);
        self.group += 1;
        Ok(())
    }
}

impl Iterator for ParquetRows {
    type Item = io::Result<Row>;

    fn next(&mut self) -> Option<Self::Item> {
        match self.decode() {
            Ok(()) => self.decoded.pop_front().map(Ok),
            Err(error) => Some(Err(io_error(error))),
        }
    }
}

/// Returns the next texts of a column, at most [`ROWS`]. A null value is `None`.
fn texts(
    column: &mut ColumnReaderImpl<ByteArrayType>,
) -> Result<Vec<Option<Vec<u8>>>, ParquetError> {
    let (mut levels, mut values) = (vec![], vec![]);
    let (rows, ..) = column.read_records(ROWS, Some(&mut levels), None, &mut values)?;
    let mut values = values.iter().map(|value| value.data().to_vec());
    if levels.is_empty() {
        // The column is required, so it has no nulls.
        return Ok(values.map(Some).collect());
    }
    let texts = levels.iter().take(rows).map(|level| match level {
        0 => None,
        _ => values.next(),
    });
    Ok(texts.collect())
}

/// Returns the index of the text column of this name.
fn column(schema: &SchemaDescriptor, key: &str) -> Option<usize> {
    schema.columns().iter().position(|column| {
        let is_key = matches!(column.path().parts(), [name] if name == key);
        is_key && is_text(column)
    })
}

fn is_text(column: &ColumnDescriptor) -> bool {
    let texts = [None, Some(&LogicalType::String), Some(&LogicalType::Enum)];
    column.physical_type() == Type::BYTE_ARRAY
        && column.max_rep_level() == 0
        && texts.contains(&column.logical_type_ref())
}

/// Lists the names of the columns.
fn describe(schema: &SchemaDescriptor) -> String {
    let columns = schema.root_schema().get_fields().iter();
    let names: Vec<_> = columns
        .map(|column| format!("`{}`", column.name()))
        .collect();
    names.join(", ")
}

fn io_error(error: ParquetError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}
