//! Finds the input files.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn_megatron_data::list_folder;
use clap::ValueEnum;

use super::counts::FileCounts;
use super::error::InputError;
use super::extension::extension;
use super::format::DocumentFormat;
use super::hugging_face;
use super::input::{Input, table_format};
use super::table;

/// Format of an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Selected by the file name.
    Auto,
    /// Plain text.
    Text,
    /// One JSON object per line.
    Jsonl,
}

/// Options for finding and reading inputs.
pub struct FindOptions<'a> {
    /// The extensions that are read in a folder. If empty, the default is used.
    pub extensions: &'a [String],
    /// Groups of default extensions. The first group with a matching file other than a README is used.
    pub default_extensions: &'a [&'a [&'a str]],
    /// The format of files that are not tables.
    pub format: Format,
    /// The split of text into documents.
    pub text: DocumentFormat,
    /// The keys of the texts in a record.
    pub keys: &'a [String],
}

/// Inputs that were found.
#[derive(Debug, Default)]
pub struct Found {
    /// The inputs, in order.
    pub inputs: Vec<Input>,
    /// The number of files that are read and skipped.
    pub counts: FileCounts,
}

/// Finds the inputs at these paths, in order. `-` is standard input. For a folder, its files are returned in the
/// order of their paths.
///
/// # Errors
/// Returns an [`InputError`] if a file is missing, is neither text nor a table, or has no column for a key.
pub fn find(paths: &[PathBuf], options: &FindOptions<'_>) -> Result<Found, InputError> {
    let mut found = Found::default();
    for given in paths {
        if given.as_os_str() == "-" {
            found.inputs.push(Input {
                path: None,
                key: vec![],
                format: options.format_of(None),
                bytes: 0,
            });
            continue;
        }
        for (key, path) in files(given, options, &mut found.counts)? {
            let kind =
                fs::metadata(&path).map_err(|source| InputError::io("read", &path, source))?;
            // A pipe can be read only once.
            let table = if kind.is_file() {
                table_format(&path)?
            } else {
                None
            };
            let format = match table {
                Some(format) => {
                    // Open the table to check for errors before anything is written.
                    drop(table::open(&path, format, options.keys, &Arc::default())?);
                    DocumentFormat::Table(format)
                }
                None => options.format_of(Some(&path)),
            };
            found.inputs.push(Input {
                path: Some(path),
                key,
                format,
                bytes: kind.len(),
            });
        }
    }
    found.counts.read = found.inputs.len();
    Ok(found)
}

impl FindOptions<'_> {
    /// Returns the format of a file that is not a table.
    fn format_of(&self, path: Option<&Path>) -> DocumentFormat {
        match (self.format, path.and_then(extension)) {
            (Format::Jsonl, _) => DocumentFormat::Json,
            (Format::Auto, Some(name)) if ["jsonl", "ndjson", "json"].contains(&&*name) => {
                DocumentFormat::Json
            }
            _ => self.text.clone(),
        }
    }

    /// Returns the extensions to look for among these files.
    fn extensions(&self, files: &[PathBuf]) -> Vec<String> {
        if !self.extensions.is_empty() {
            let bare = |extension: &String| extension.trim_start_matches('.').to_lowercase();
            return self.extensions.iter().map(bare).collect();
        }
        let has_file = |extensions: &&&[&str]| {
            let described = files.iter().filter(|path| !hugging_face::is_readme(path));
            let mut found = described.filter_map(|path| extension(path));
            found.any(|extension| extensions.contains(&&*extension))
        };
        let found = self.default_extensions.iter().find(has_file);
        let all = || self.default_extensions.concat();
        let extensions = found.map_or_else(all, |extensions| extensions.to_vec());
        extensions.into_iter().map(String::from).collect()
    }
}

/// Returns the file, or the files of the folder, each with its key. Counts the skipped files of the folder.
fn files(
    given: &Path,
    options: &FindOptions<'_>,
    counts: &mut FileCounts,
) -> Result<Vec<(Vec<u8>, PathBuf)>, InputError> {
    let kind = fs::metadata(given).map_err(|source| InputError::io("read", given, source))?;
    if !kind.is_dir() {
        return Ok(vec![(vec![], given.to_path_buf())]);
    }
    let all = list_folder(given, |_| true)?;
    let dataset = if options.extensions.is_empty() {
        hugging_face::data_files(given, &all)?
    } else {
        None
    };
    let extensions = options.extensions(&all);
    let of_dataset: Option<HashSet<&PathBuf>> =
        dataset.as_ref().map(|files| files.iter().collect());
    let is_read = |path: &PathBuf| match &of_dataset {
        Some(files) => files.contains(path),
        None => extension(path).is_some_and(|found| extensions.contains(&found)),
    };
    let (read, left_out): (Vec<_>, Vec<_>) = all.into_iter().partition(is_read);
    for path in &left_out {
        let split = dataset.as_ref().and_then(|_| hugging_face::split_of(path));
        counts.leave_out(match (split, extension(path)) {
            (Some(split), _) => format!("split {split}"),
            (None, Some(extension)) => format!(".{extension}"),
            (None, None) => "without an extension".into(),
        });
    }
    // Use the order of the dataset.
    let read = dataset.unwrap_or(read);
    if read.is_empty() {
        let extensions: Vec<_> = extensions.iter().map(|end| format!(".{end}")).collect();
        return Err(InputError::NoFiles {
            path: given.to_path_buf(),
            extensions: extensions.join(", "),
            counts: std::mem::take(counts),
        });
    }
    let key = |path: &PathBuf| key(path.strip_prefix(given).unwrap_or(path));
    Ok(read.into_iter().map(|path| (key(&path), path)).collect())
}

/// Returns a relative path joined with `/` on every system.
fn key(path: &Path) -> Vec<u8> {
    let parts: Vec<_> = path.iter().map(|part| part.as_encoded_bytes()).collect();
    parts.join(&b'/')
}
