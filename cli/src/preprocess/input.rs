//! The files that are read, and what each is.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn_megatron::data::list_folder;
use flate2::read::MultiGzDecoder;

use super::args::{Format, PreprocessArgs};
use super::error::{PreprocessError, Unit};

/// Bytes that are read at once.
const BUFFER: usize = 1 << 18;

/// How the documents of a file lie in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Layout {
    /// The file is one.
    Whole,
    /// They end with these bytes.
    Separated(Vec<u8>),
    /// Every line is one.
    Lines,
    /// Every line is a JSON object.
    Json,
}

impl Layout {
    /// What the number of a document counts.
    pub fn unit(&self) -> Unit {
        match self {
            Self::Whole => Unit::File,
            Self::Separated(_) => Unit::Document,
            Self::Lines | Self::Json => Unit::Line,
        }
    }
}

/// A file to read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Input {
    /// Nothing for standard input.
    pub path: Option<PathBuf>,
    /// How its documents lie in it.
    pub layout: Layout,
    /// Its bytes as they lie on disk.
    pub bytes: u64,
}

impl Input {
    /// As a person reads it.
    pub fn name(&self) -> Arc<str> {
        match &self.path {
            Some(path) => path.display().to_string().into(),
            None => "standard input".into(),
        }
    }

    /// Reads it, unpacked; `read` counts the bytes as they lie on disk.
    pub fn open(&self, read: &Arc<AtomicU64>) -> io::Result<Box<dyn BufRead + Send>> {
        let count = |from| Counted {
            from,
            read: Arc::clone(read),
        };
        let Some(path) = &self.path else {
            let input: Box<dyn Read + Send> = Box::new(io::stdin());
            return Ok(Box::new(BufReader::with_capacity(BUFFER, count(input))));
        };
        let file = count(Box::new(File::open(path)?));
        let unpacked: Box<dyn Read + Send> = match packing(path) {
            Some("gz") => Box::new(MultiGzDecoder::new(file)),
            Some(_) => Box::new(zstd::stream::read::Decoder::new(file)?),
            None => Box::new(file),
        };
        Ok(Box::new(BufReader::with_capacity(BUFFER, unpacked)))
    }
}

/// Counts what is read.
struct Counted {
    from: Box<dyn Read + Send>,
    read: Arc<AtomicU64>,
}

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let bytes = self.from.read(buffer)?;
        self.read.fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(bytes)
    }
}

/// All inputs in their order.
///
/// # Errors
/// [`PreprocessError`] for what is not there, for folders with nothing to read, and for flags that no
/// input heeds.
pub fn find(args: &PreprocessArgs) -> Result<Vec<Input>, PreprocessError> {
    let text = match (&args.separator, args.lines) {
        (Some(separator), _) => Layout::Separated(unescape(separator)?),
        (None, true) => Layout::Lines,
        (None, false) => Layout::Whole,
    };
    let layout = |path: Option<&Path>| match (args.format, path.and_then(extension)) {
        (Format::Jsonl, _) => Layout::Json,
        (Format::Auto, Some(name)) if ["jsonl", "ndjson", "json"].contains(&&*name) => Layout::Json,
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
    let any_json = inputs.iter().any(|input| input.layout == Layout::Json);
    let any_text = inputs.iter().any(|input| input.layout != Layout::Json);
    if inputs.iter().filter(|input| input.path.is_none()).count() > 1 {
        return Err(PreprocessError::Ignored(
            "standard input is there once: give one `-`",
        ));
    }
    if !args.json_key.is_empty() && !any_json {
        return Err(PreprocessError::Ignored(
            "--json-key is about JSON lines, and all inputs are text; --format jsonl says otherwise",
        ));
    }
    if args.json_key.len() > 1 && any_text {
        return Err(PreprocessError::Ignored(
            "several keys have files of their own, and some inputs are text, which has no keys; --format \
             jsonl says otherwise",
        ));
    }
    if (args.lines || args.separator.is_some()) && !any_text {
        return Err(PreprocessError::Ignored(
            "--lines and --separator are about text, and all inputs are JSON lines; --format text says \
             otherwise",
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
    match files.is_empty() {
        false => Ok(files),
        true => {
            let extensions: Vec<_> = extensions()
                .map(|x| format!(".{}", x.trim_start_matches('.')))
                .collect();
            Err(PreprocessError::NoFiles {
                path: given.to_path_buf(),
                extensions: extensions.join(", "),
            })
        }
    }
}

/// `gz` or `zst`, where the name ends so.
fn packing(path: &Path) -> Option<&'static str> {
    let extension = path.extension()?;
    ["gz", "zst"]
        .into_iter()
        .find(|packing| extension.eq_ignore_ascii_case(packing))
}

/// The extension of what is packed, in lower case.
fn extension(path: &Path) -> Option<String> {
    let name = match packing(path) {
        Some(_) => Path::new(path.file_stem()?),
        None => path,
    };
    Some(name.extension()?.to_str()?.to_lowercase())
}

/// The bytes of a separator, whose escapes are what shells cannot easily say.
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
