//! Input files.

use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use burn_megatron::regular_file;
use flate2::read::MultiGzDecoder;

use super::counting_reader::CountingReader;
use super::error::InputError;
use super::extension::{compression, extension};
use super::format::DocumentFormat;
use super::magic::{FileKind, HEAD, kind};
use super::source::DocumentSource;
use super::split::DocumentReader;
use super::table::{self, TableFormat};

/// The size of the read buffer in bytes.
const BUFFER: usize = 1 << 18;

/// File to read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Input {
    /// The path, or `None` for standard input.
    pub path: Option<PathBuf>,
    /// The path relative to the given folder. Empty if the file itself was given.
    pub key: Vec<u8>,
    /// The split into documents.
    pub format: DocumentFormat,
    /// The size on disk in bytes.
    pub bytes: u64,
}

impl Input {
    /// Returns the name for messages.
    pub fn name(&self) -> Arc<str> {
        name(self.path.as_deref()).into()
    }

    /// Opens the documents, of at most `limit` bytes each. `keys` are the keys of the texts in a record. `read`
    /// counts the bytes on disk that were read.
    ///
    /// # Errors
    /// Returns an [`InputError`] if the file cannot be opened.
    pub fn open(
        &self,
        keys: &[String],
        limit: usize,
        read: &Arc<AtomicU64>,
    ) -> Result<DocumentSource, InputError> {
        match (&self.format, &self.path) {
            (DocumentFormat::Table(format), Some(path)) => Ok(DocumentSource::Table {
                rows: table::open(path, *format, keys, read)?,
                limit,
            }),
            (format, path) => {
                let (table, text) = open(path.as_deref(), read)?;
                if let Some(table) = table {
                    let advice = "it cannot be read from a pipe: give the path of a file";
                    return Err(not_text(path.as_deref(), table.name(), advice));
                }
                let text: Box<dyn BufRead + Send> =
                    Box::new(BufReader::with_capacity(BUFFER, text));
                Ok(DocumentSource::Text {
                    reader: DocumentReader::new(text, format, limit),
                    json: *format == DocumentFormat::Json,
                })
            }
        }
    }
}

fn name(path: Option<&Path>) -> String {
    path.map_or("standard input".into(), |path| path.display().to_string())
}

fn not_text(path: Option<&Path>, kind: &'static str, advice: &str) -> InputError {
    InputError::NotText {
        path: name(path),
        kind,
        advice: advice.into(),
    }
}

/// Returns the table format of a file, or `None` if the file is not a table.
///
/// # Errors
/// Returns [`InputError::NotText`] if the file is neither a table nor text, and [`InputError::Io`] if it cannot be
/// read.
pub fn table_format(path: &Path) -> Result<Option<TableFormat>, InputError> {
    let (format, _) = open(Some(path), &Arc::default())?;
    Ok(format)
}

type Stream = Box<dyn Read + Send>;

/// Opens a file or standard input. Returns the decompressed bytes, and the table format if the input is a table.
fn open(
    path: Option<&Path>,
    read: &Arc<AtomicU64>,
) -> Result<(Option<TableFormat>, Stream), InputError> {
    let failed = |source| InputError::Io {
        action: "read",
        path: name(path),
        source,
    };
    let from: Stream = match path {
        Some(path) => Box::new(regular_file::open_stream(path).map_err(failed)?),
        None => Box::new(io::stdin()),
    };
    let read = Arc::clone(read);
    let (found, from) = peek(Box::new(CountingReader { from, read })).map_err(failed)?;
    let compressed = path.and_then(compression);
    let (found, from) = match (found, compressed) {
        (FileKind::Gzip, _) | (_, Some("gz")) => {
            peek(Box::new(MultiGzDecoder::new(from))).map_err(failed)?
        }
        (FileKind::Zstd, _) | (_, Some(_)) => {
            peek(unpack_zstd(from).map_err(failed)?).map_err(failed)?
        }
        (FileKind::Table(format), None) => return Ok((Some(format), from)),
        (found, None) => (found, from),
    };
    match found {
        FileKind::Text if let Some(kind) = path.and_then(damaged_table) => {
            let advice =
                "it does not begin like a file of this format; download it or write it again";
            Err(not_text(path, kind, advice))
        }
        FileKind::Text => Ok((None, from)),
        FileKind::Table(format) => {
            let advice = "it has its own compression: decompress the file";
            Err(not_text(path, format.name(), advice))
        }
        FileKind::Gzip | FileKind::Zstd => Err(not_text(
            path,
            "compressed twice",
            "decompress the file once",
        )),
        FileKind::Binary(format) => Err(not_text(path, format.name, &format.advice(&name(path)))),
    }
}

/// Returns the kind of a stream, and a stream that starts at the beginning.
fn peek(mut from: Stream) -> io::Result<(FileKind, Stream)> {
    let mut head = vec![];
    from.by_ref().take(HEAD).read_to_end(&mut head)?;
    let kind = kind(&head);
    let whole: Stream = Box::new(Cursor::new(head).chain(from));
    Ok((kind, whole))
}

/// Returns the kind of a file that is named like a table, but whose content is not a table.
fn damaged_table(path: &Path) -> Option<&'static str> {
    match &*extension(path)? {
        "parquet" => Some("a damaged Parquet file"),
        "arrow" | "feather" => Some("a damaged Arrow file"),
        _ => None,
    }
}

#[cfg(feature = "zstd")]
fn unpack_zstd(from: Stream) -> io::Result<Stream> {
    Ok(Box::new(zstd::stream::read::Decoder::new(from)?))
}

#[cfg(not(feature = "zstd"))]
fn unpack_zstd(_from: Stream) -> io::Result<Stream> {
    Err(io::Error::other(
        "this program was built without zstd; build it with --features zstd",
    ))
}
