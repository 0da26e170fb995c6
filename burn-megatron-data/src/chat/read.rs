//! Reads JSON lines files.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use super::error::{ChatDataError, ChatLineError};
use super::tokens::{ChatTokenizer, ChatTokens};
use crate::{DataError, list_folder};
use burn_megatron::regular_file;

/// The maximum number of lines that are tokenized at once.
const LINES: usize = 4096;

/// The maximum number of bytes that are tokenized at once, except for a single longer line.
const BYTES: usize = 16 << 20;

/// Returns the given files and the `.jsonl` files of the given folders.
pub(super) fn files(given: &[PathBuf]) -> Result<Vec<PathBuf>, DataError> {
    let mut found = vec![];
    for path in given {
        let kind = fs::metadata(path).map_err(|source| match source.kind() {
            std::io::ErrorKind::NotFound => DataError::Missing { path: path.clone() },
            _ => unreadable(path, source),
        })?;
        if !kind.is_dir() {
            found.push(path.clone());
            continue;
        }
        let files = list_folder(path, |path| {
            path.extension().is_some_and(|end| end == "jsonl")
        })?;
        if files.is_empty() {
            return Err(ChatDataError::NoFiles(path.clone()).into());
        }
        found.extend(files);
    }
    Ok(found)
}

fn unreadable(path: &Path, source: std::io::Error) -> DataError {
    DataError::Unreadable {
        path: path.into(),
        source,
    }
}

/// Tokenizes the lines of a file. `take` receives them in order, with their line numbers from 1. Empty lines are
/// skipped.
pub(super) fn examples(
    path: &Path,
    worker: &ChatTokenizer<'_>,
    progress: &mut dyn FnMut(u64),
    take: &mut dyn FnMut(u64, ChatTokens) -> Result<(), ChatDataError>,
) -> Result<(), DataError> {
    let file = regular_file::open_stream(path).map_err(|source| unreadable(path, source))?;
    let mut file = BufReader::with_capacity(1 << 18, file);
    let mut number = 0;
    loop {
        let (mut lines, mut bytes) = (vec![], 0);
        while lines.len() < LINES && bytes < BYTES {
            let mut line = vec![];
            let read = file.read_until(b'\n', &mut line);
            let read = read.map_err(|source| unreadable(path, source))?;
            if read == 0 {
                break;
            }
            bytes += read;
            number += 1;
            let line = String::from_utf8(line).map_err(|error| {
                let from = error.utf8_error().valid_up_to();
                ChatLineError::NotUtf8(from).at(path, number)
            })?;
            // A byte order mark may begin a file.
            let text = line.trim_start_matches('\u{feff}').trim();
            if !text.is_empty() {
                lines.push((number, text.to_string()));
            }
        }
        if bytes == 0 {
            return Ok(());
        }
        // Each thread has a separate cache of words.
        let clone = || worker.tokenizer.clone();
        let done: Vec<Result<ChatTokens, ChatLineError>> = lines
            .par_iter()
            .map_init(clone, |tokenizer, (_, line)| worker.line(line, tokenizer))
            .collect();
        for ((number, _), tokens) in lines.iter().zip(done) {
            take(*number, tokens.map_err(|source| source.at(path, *number))?)?;
        }
        progress(bytes as u64);
    }
}
