//! Files that grow by lines of JSON, and say where a run went on.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::metrics::MetricsError;

/// Where a run went on: after `step` updates. It says that what stands before it of later steps counts no
/// more.
#[derive(Serialize, Deserialize)]
pub(super) struct Marker {
    kind: MarkerKind,
    pub(super) step: usize,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum MarkerKind {
    Resumed,
}

/// The lines of `text`, but for torn ones. A last one without an end is looked at only where a run
/// `resumes`, as its marker will follow it: whole, it counts then.
pub(super) fn lines<'a, T: DeserializeOwned + 'a>(
    path: &'a Path,
    text: &'a str,
    resumes: bool,
) -> impl Iterator<Item = Result<T, MetricsError>> + 'a {
    let mut lines = text
        .split_inclusive('\n')
        .filter(move |line| resumes || line.ends_with('\n'))
        .enumerate()
        .peekable();
    std::iter::from_fn(move || {
        loop {
            let (number, line) = lines.next()?;
            let source = match serde_json::from_str(line) {
                Ok(record) => return Some(Ok(record)),
                Err(source) => source,
            };
            let is_torn = match lines.peek() {
                Some((_, next)) => serde_json::from_str::<Marker>(next).is_ok(),
                None => !line.ends_with('\n'),
            };
            if !is_torn {
                return Some(Err(MetricsError::BadLine {
                    path: path.to_path_buf(),
                    line: number + 1,
                    source,
                }));
            }
        }
    })
}

pub(super) fn read(path: &Path) -> Result<String, MetricsError> {
    std::fs::read_to_string(path).map_err(|source| io_error("read", path, source))
}

fn io_error(action: &'static str, path: &Path, source: io::Error) -> MetricsError {
    MetricsError::Io {
        action,
        path: path.to_path_buf(),
        source,
    }
}

/// A file that grows by whole lines, each with the operating system as soon as it is written: a run
/// that is killed loses none.
#[derive(Debug)]
pub(super) struct JsonLines {
    file: File,
    path: PathBuf,
}

impl JsonLines {
    pub(super) fn create(path: &Path) -> Result<Self, MetricsError> {
        let file = OpenOptions::new().append(true).create_new(true).open(path);
        let file = file.map_err(|source| io_error("create", path, source))?;
        Ok(Self {
            file,
            path: path.to_path_buf(),
        })
    }

    /// Opens an existing file, with this text, and says that what follows goes on after `updates` updates.
    pub(super) fn resume(path: &Path, text: &str, updates: usize) -> Result<Self, MetricsError> {
        let file = OpenOptions::new().append(true).open(path);
        let mut lines = Self {
            file: file.map_err(|source| io_error("open", path, source))?,
            path: path.to_path_buf(),
        };
        // Where a line was torn its end comes first, in the same write.
        let is_torn = !text.is_empty() && !text.ends_with('\n');
        let end = if is_torn { &b"\n"[..] } else { &[] };
        let kind = MarkerKind::Resumed;
        lines.write_after(
            end,
            &Marker {
                kind,
                step: updates,
            },
        )?;
        Ok(lines)
    }

    pub(super) fn write(&mut self, record: &impl Serialize) -> Result<(), MetricsError> {
        self.write_after(&[], record)
    }

    fn write_after(&mut self, before: &[u8], record: &impl Serialize) -> Result<(), MetricsError> {
        let failed = |source| io_error("write to", &self.path, source);
        let mut line = before.to_vec();
        serde_json::to_writer(&mut line, record).map_err(|error| failed(error.into()))?;
        line.push(b'\n');
        // One unbuffered write: the line is flushed when it returns.
        self.file.write_all(&line).map_err(failed)
    }
}
