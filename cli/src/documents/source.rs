//! Documents of an input.

use std::io::{self, BufRead};

use super::error::BadDocument;
use super::record;
use super::split::{DocumentReader, NextDocument};
use super::table::{Row, Rows};

/// Document as stored in its file.
#[derive(Debug, PartialEq, Eq)]
pub enum DocumentContent {
    /// A text.
    Text(Vec<u8>),
    /// A JSON object, or an empty line.
    Json(Vec<u8>),
    /// The texts of a row.
    Row(Row),
}

impl DocumentContent {
    /// Returns the size in bytes.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Text(bytes) | Self::Json(bytes) => bytes.len(),
            Self::Row(texts) => texts.iter().flatten().map(Vec::len).sum(),
        }
    }

    /// Returns the text under each key. For a plain text, returns the text itself.
    ///
    /// # Errors
    /// Returns a [`BadDocument`] if a text is missing or invalid.
    pub fn texts(self, keys: &[String]) -> Result<Vec<String>, BadDocument> {
        match self {
            Self::Text(text) => Ok(vec![utf8(text)?]),
            // An empty line is not an error.
            Self::Json(line) if line.trim_ascii().is_empty() => Ok(vec![String::new(); keys.len()]),
            Self::Json(line) => record::texts(&line, keys),
            Self::Row(row) => {
                let texts = row.into_iter().zip(keys).map(|(text, key)| {
                    text.map_or_else(|| Err(BadDocument::NoText(key.clone())), utf8)
                });
                texts.collect()
            }
        }
    }
}

fn utf8(text: Vec<u8>) -> Result<String, BadDocument> {
    String::from_utf8(text).map_err(|error| BadDocument::NotUtf8(error.utf8_error().valid_up_to()))
}

/// Iterator over the documents of an input.
pub enum DocumentSource {
    /// The documents of a text, or of JSON lines.
    Text {
        /// Splits the text.
        reader: DocumentReader<Box<dyn BufRead + Send>>,
        /// Whether the documents are JSON objects.
        json: bool,
    },
    /// The rows of a table.
    Table {
        /// The rows.
        rows: Rows,
        /// Maximum size of the texts in bytes.
        limit: usize,
    },
}

impl DocumentSource {
    /// Returns the next document.
    ///
    /// # Errors
    /// Returns an error if reading fails, for example because a compressed file is truncated.
    pub fn next(&mut self) -> io::Result<NextDocument<DocumentContent>> {
        match self {
            Self::Text { reader, json } => Ok(match reader.next()? {
                NextDocument::Document(line) if *json => {
                    NextDocument::Document(DocumentContent::Json(line))
                }
                NextDocument::Document(text) => NextDocument::Document(DocumentContent::Text(text)),
                NextDocument::TooLong => NextDocument::TooLong,
                NextDocument::End => NextDocument::End,
            }),
            Self::Table { rows, limit } => Ok(match rows.next().transpose()? {
                Some(row) if row.iter().flatten().any(|text| text.len() > *limit) => {
                    NextDocument::TooLong
                }
                Some(row) => NextDocument::Document(DocumentContent::Row(row)),
                None => NextDocument::End,
            }),
        }
    }
}
