//! The input files and their formats.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn_megatron::data::list_folder;
use flate2::read::MultiGzDecoder;

use super::args::{Format, PreprocessArgs};
use super::error::{PositionUnit, PreprocessError};

/// Size of the read buffer in bytes.
const BUFFER: usize = 1 << 18;

/// How a file is split into documents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DocumentLayout {
    /// The file is one document.
    Whole,
    /// Documents end with these bytes.
    Separated(Vec<u8>),
    /// Every line is a document.
    Lines,
    /// Every line is a JSON object.
    Json,
}

impl DocumentLayout {
    /// What the number of a document counts.
    pub fn unit(&self) -> PositionUnit {
        match self {
            Self::Whole => PositionUnit::File,
            Self::Separated(_) => PositionUnit::Document,
            Self::Lines | Self::Json => PositionUnit::Line,
        }
    }
}

/// A file to read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Input {
    /// The path; `None` for standard input.
    pub path: Option<PathBuf>,
    /// How it is split into documents.
    pub layout: DocumentLayout,
    /// Its size on disk in bytes.
    pub bytes: u64,
}

impl Input {
    /// Its name in messages.
    pub fn name(&self) -> Arc<str> {
        match &self.path {
            Some(path) => path.display().to_string().into(),
            None => "standard input".into(),
        }
    }

    /// Opens it, decompressed; `read` counts the bytes as they are on disk.
    pub fn open(&self, read: &Arc<AtomicU64>) -> io::Result<Box<dyn BufRead + Send>> {
        let count = |from| CountingReader {
            from,
            read: Arc::clone(read),
        };
        let Some(path) = &self.path else {
            let input: Box<dyn Read + Send> = Box::new(io::stdin());
            return Ok(Box::new(BufReader::with_capacity(BUFFER, count(input))));
        };
        let file = count(Box::new(File::open(path)?));
        let unpacked: Box<dyn Read + Send> = match compression(path) {
            Some("gz") => Box::new(MultiGzDecoder::new(file)),
            Some(_) => unpack_zstd(file)?,
            None => Box::new(file),
        };
        Ok(Box::new(BufReader::with_capacity(BUFFER, unpacked)))
    }
}

#[cfg(feature = "zstd")]
fn unpack_zstd(file: impl Read + Send + 'static) -> io::Result<Box<dyn Read + Send>> {
    Ok(Box::new(zstd::stream::read::Decoder::new(file)?))
}

#[cfg(not(feature = "zstd"))]
fn unpack_zstd(_file: impl Read + Send + 'static) -> io::Result<Box<dyn Read + Send>> {
    Err(io::Error::other(
        "this program was built without zstd; build it with --features zstd",
    ))
}

/// Counts the bytes that are read.
struct CountingReader {
    from: Box<dyn Read + Send>,
    read: Arc<AtomicU64>,
}

impl Read for CountingReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let bytes = self.from.read(buffer)?;
        self.read.fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(bytes)
    }
}

/// All inputs in their order.
///
/// # Errors
/// [`PreprocessError`] for missing files, for folders with nothing to read, and for flags without effect.
pub fn find(args: &PreprocessArgs) -> Result<Vec<Input>, PreprocessError> {
    let text = match (&args.separator, args.lines) {
        (Some(separator), _) => DocumentLayout::Separated(unescape(separator)?),
        (None, true) => DocumentLayout::Lines,
        (None, false) => DocumentLayout::Whole,
    };
    let layout = |path: Option<&Path>| match (args.format, path.and_then(extension)) {
        (Format::Jsonl, _) => DocumentLayout::Json,
        (Format::Auto, Some(name)) if ["jsonl", "ndjson", "json"].contains(&&*name) => {
            DocumentLayout::Json
        }
        _ => text.clone(),
    };
    let mut inputs = vec![];
    for given in &args.inputs {
        if given.as_os_str() == "-" {
            let (path, bytes) = (None, 0);
            let layout = layout(path);
            let path = path.map(Path::to_path_buf);
            inputs.push(Input {
                path,
                layout,
                bytes,
            });
            continue;
        }
        for path in files(given, args)? {
            let bytes = fs::metadata(&path).map_err(|source| io_error("read", &path, source))?;
            inputs.push(Input {
                layout: layout(Some(&path)),
                bytes: bytes.len(),
                path: Some(path),
            });
        }
    }
    let any_json = inputs
        .iter()
        .any(|input| input.layout == DocumentLayout::Json);
    let any_text = inputs
        .iter()
        .any(|input| input.layout != DocumentLayout::Json);
    if inputs.iter().filter(|input| input.path.is_none()).count() > 1 {
        return Err(PreprocessError::Ignored(
            "standard input can be read once: give a single `-`",
        ));
    }
    if !args.json_key.is_empty() && !any_json {
        return Err(PreprocessError::Ignored(
            "--json-key applies to JSON lines, and all inputs are text; see --format jsonl",
        ));
    }
    if args.json_key.len() > 1 && any_text {
        return Err(PreprocessError::Ignored(
            "several keys apply to JSON lines only, and some inputs are text; see --format jsonl",
        ));
    }
    if (args.lines || args.separator.is_some()) && !any_text {
        return Err(PreprocessError::Ignored(
            "--lines and --separator apply to text, and all inputs are JSON lines; see --format text",
        ));
    }
    Ok(inputs)
}

/// The file, or those of the folder.
fn files(given: &Path, args: &PreprocessArgs) -> Result<Vec<PathBuf>, PreprocessError> {
    let kind = fs::metadata(given).map_err(|source| io_error("read", given, source))?;
    if !kind.is_dir() {
        return Ok(vec![given.to_path_buf()]);
    }
    let extensions = || args.extensions.iter();
    let wanted = |path: &Path| {
        let found = extension(path);
        found.is_some_and(|found| {
            extensions().any(|x| x.trim_start_matches('.').eq_ignore_ascii_case(&found))
        })
    };
    let files = list_folder(given, wanted)?;
    if files.is_empty() {
        let extensions: Vec<_> = extensions()
            .map(|x| format!(".{}", x.trim_start_matches('.')))
            .collect();
        Err(PreprocessError::NoFiles {
            path: given.to_path_buf(),
            extensions: extensions.join(", "),
        })
    } else {
        Ok(files)
    }
}

/// `gz` or `zst`, if the name ends in it.
fn compression(path: &Path) -> Option<&'static str> {
    let extension = path.extension()?;
    ["gz", "zst"]
        .into_iter()
        .find(|packing| extension.eq_ignore_ascii_case(packing))
}

/// The extension without that of the compression, in lower case.
fn extension(path: &Path) -> Option<String> {
    let name = match compression(path) {
        Some(_) => Path::new(path.file_stem()?),
        None => path,
    };
    Some(name.extension()?.to_str()?.to_lowercase())
}

/// The bytes of a separator, with escapes for characters that are hard to type in a shell.
fn unescape(text: &str) -> Result<Vec<u8>, PreprocessError> {
    if text.is_empty() {
        return Err(PreprocessError::EmptySeparator);
    }
    let mut bytes = vec![];
    let mut left = text;
    while let Some(first) = left.chars().next() {
        let escaped = match left.as_bytes() {
            [b'\\', b'n', ..] => Some(b'\n'),
            [b'\\', b'r', ..] => Some(b'\r'),
            [b'\\', b't', ..] => Some(b'\t'),
            [b'\\', b'0', ..] => Some(b'\0'),
            [b'\\', b'\\', ..] => Some(b'\\'),
            _ => None,
        };
        let used = match escaped {
            Some(byte) => {
                bytes.push(byte);
                2
            }
            None => {
                bytes.extend(&left.as_bytes()[..first.len_utf8()]);
                first.len_utf8()
            }
        };
        left = &left[used..];
    }
    Ok(bytes)
}

pub fn io_error(action: &'static str, path: &Path, source: io::Error) -> PreprocessError {
    PreprocessError::Io {
        action,
        path: path.display().to_string(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn separators_have_escapes() {
        let of = |text| unescape(text).unwrap();
        assert_eq!(of(r"\n\n"), b"\n\n");
        assert_eq!(of(r"é\0\\n<\t>\r\"), b"\xc3\xa9\0\\n<\t>\r\\");
        assert!(unescape("").is_err());
    }

    #[test]
    fn packed_files_have_the_extension_of_what_they_hold() {
        let of = |name: &str| extension(Path::new(name));
        assert_eq!(of("a/b.JSONL.gz").as_deref(), Some("jsonl"));
        assert_eq!(of("b.txt.ZST").as_deref(), Some("txt"));
        assert_eq!(of("b.md").as_deref(), Some("md"));
        assert_eq!(of("b.gz"), None);
    }
}
