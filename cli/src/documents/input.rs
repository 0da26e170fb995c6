//! An input file and its format.

use std::io::{self, BufRead, BufReader, Cursor, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn_megatron::regular_file;
use flate2::read::MultiGzDecoder;

use super::error::{InputError, PositionUnit};
use super::magic::{FileKind, HEAD, kind};
use super::source::DocumentSource;
use super::split::DocumentReader;
use super::table::{self, TableFormat};

/// Size of the read buffer in bytes.
const BUFFER: usize = 1 << 18;

/// The split of a file into documents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DocumentFormat {
    /// The file is one document.
    Whole,
    /// Documents end with these bytes.
    Separated(Vec<u8>),
    /// Every line is a document.
    Lines,
    /// Every line is a JSON object.
    Json,
    /// Every row of a table is a document.
    Table(TableFormat),
}

impl DocumentFormat {
    /// Returns the unit of the number of a document.
    pub fn unit(&self) -> PositionUnit {
        match self {
            Self::Whole => PositionUnit::File,
            Self::Separated(_) => PositionUnit::Document,
            Self::Lines | Self::Json => PositionUnit::Line,
            Self::Table(_) => PositionUnit::Row,
        }
    }

    /// Whether documents are records, with texts under keys.
    pub fn has_keys(&self) -> bool {
        matches!(self, Self::Json | Self::Table(_))
    }
}

/// A file to read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Input {
    /// The path; `None` for standard input.
    pub path: Option<PathBuf>,
    /// The path in the folder that was given; of a file that was given, nothing.
    pub key: Vec<u8>,
    /// The split into documents.
    pub format: DocumentFormat,
    /// Its size on disk in bytes.
    pub bytes: u64,
}

impl Input {
    /// Its name in messages.
    pub fn name(&self) -> Arc<str> {
        name(self.path.as_deref()).into()
    }

    /// Its documents, of at most `limit` bytes each; `keys` name the texts of a record, and `read` counts the bytes as
    /// they are on disk.
    ///
    /// # Errors
    /// [`InputError`].
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

/// The format of the table that a file is, if it is one.
///
/// # Errors
/// [`InputError::NotText`] if it is neither a table nor text, [`InputError::Io`].
pub fn table_format(path: &Path) -> Result<Option<TableFormat>, InputError> {
    let (format, _) = open(Some(path), &Arc::default())?;
    Ok(format)
}

type Stream = Box<dyn Read + Send>;

/// The bytes of a file, or of standard input, decompressed, and the format of the table that they are.
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
            let advice = "it has a compression of its own: decompress the file";
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

/// Returns the kind of a stream, and the stream from its start.
fn peek(mut from: Stream) -> io::Result<(FileKind, Stream)> {
    let mut head = vec![];
    from.by_ref().take(HEAD).read_to_end(&mut head)?;
    let kind = kind(&head);
    let whole: Stream = Box::new(Cursor::new(head).chain(from));
    Ok((kind, whole))
}

/// Counts the bytes that are read.
pub struct CountingReader<R> {
    /// The source of the bytes.
    pub from: R,
    /// The number of bytes.
    pub read: Arc<AtomicU64>,
}

impl<R: Read> Read for CountingReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let bytes = self.from.read(buffer)?;
        self.read.fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(bytes)
    }
}

impl<R: Seek> Seek for CountingReader<R> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.from.seek(to)
    }
}

/// `gz` or `zst`, if the name ends in it.
fn compression(path: &Path) -> Option<&'static str> {
    let extension = path.extension()?;
    ["gz", "zst"]
        .into_iter()
        .find(|packing| extension.eq_ignore_ascii_case(packing))
}

/// Returns the kind of a file whose name is the name of a table, but whose content is not a table.
fn damaged_table(path: &Path) -> Option<&'static str> {
    match &*extension(path)? {
        "parquet" => Some("a damaged Parquet file"),
        "arrow" | "feather" => Some("a damaged Arrow file"),
        _ => None,
    }
}

/// The extension without that of the compression, in lower case.
pub fn extension(path: &Path) -> Option<String> {
    let name = match compression(path) {
        Some(_) => Path::new(path.file_stem()?),
        None => path,
    };
    Some(name.extension()?.to_str()?.to_lowercase())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_files_have_the_extension_of_what_they_hold() {
        let of = |name: &str| extension(Path::new(name));
        assert_eq!(of("a/b.JSONL.gz").as_deref(), Some("jsonl"));
        assert_eq!(of("b.txt.ZST").as_deref(), Some("txt"));
        assert_eq!(of("b.md").as_deref(), Some("md"));
        assert_eq!(of("b.gz"), None);
    }
}
