//! Append-only files of JSON lines, with markers where a run was resumed.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::metrics::MetricsError;
use burn_megatron::regular_file;

/// The maximum size of a file that is read, in bytes.
const MAX_BYTES: u64 = 8 << 30;

/// A marker of a resumed run, after `step` updates. It invalidates earlier lines of later steps.
#[derive(Serialize, Deserialize)]
pub(super) struct ResumeMarker {
    kind: ResumeMarkerKind,
    pub(super) step: usize,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ResumeMarkerKind {
    Resumed,
}

/// Returns the records of `text` without truncated lines. A last line without a line break is parsed only if the file
/// is being resumed (`resumes`), because a marker follows it.
pub(super) fn lines<'a, T: DeserializeOwned + 'a>(
    path: &'a Path,
    text: &'a [u8],
    resumes: bool,
) -> impl Iterator<Item = Result<T, MetricsError>> + 'a {
    let mut lines = text
        .split_inclusive(|byte| *byte == b'\n')
        .filter(move |line| resumes || line.ends_with(b"\n"))
        .enumerate()
        .peekable();
    std::iter::from_fn(move || {
        loop {
            let (number, line) = lines.next()?;
            let source = match serde_json::from_slice(line) {
                Ok(record) => return Some(Ok(record)),
                Err(source) => source,
            };
            let is_truncated = match lines.peek() {
                Some((_, next)) => serde_json::from_slice::<ResumeMarker>(next).is_ok(),
                None => !line.ends_with(b"\n"),
            };
            if !is_truncated {
                return Some(Err(MetricsError::BadLine {
                    path: path.to_path_buf(),
                    line: number + 1,
                    source,
                }));
            }
        }
    })
}

/// Reads the bytes of a file, which may contain invalid UTF-8.
pub(super) fn read(path: &Path) -> Result<Vec<u8>, MetricsError> {
    regular_file::read(path, MAX_BYTES).map_err(|source| io_error("read", path, source))
}

fn io_error(action: &'static str, path: &Path, source: io::Error) -> MetricsError {
    MetricsError::Io {
        action,
        path: path.to_path_buf(),
        source,
    }
}

/// An append-only file of lines. Each line is written with a single unbuffered write, so that a killed process loses
/// none.
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

    /// Opens an existing file with this text, and appends a marker that the run resumes after `updates` updates.
    pub(super) fn resume(path: &Path, text: &[u8], updates: usize) -> Result<Self, MetricsError> {
        let file = regular_file::open_with(path, OpenOptions::new().append(true));
        let mut lines = Self {
            file: file.map_err(|source| io_error("open", path, source))?,
            path: path.to_path_buf(),
        };
        // Ends a truncated line first, in the same write.
        let is_truncated = !text.is_empty() && !text.ends_with(b"\n");
        let end = if is_truncated { &b"\n"[..] } else { &[] };
        let kind = ResumeMarkerKind::Resumed;
        lines.write_after(
            end,
            &ResumeMarker {
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
        // The write is unbuffered: the line is flushed when this function returns.
        self.file.write_all(&line).map_err(failed)
    }
}
