//! Reads the text of a recipe.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use burn_megatron_data::{DataError, TextDocuments};

use super::settings::DataConfig;
use crate::documents::{
    BadDocument, DocumentFormat, DocumentPosition, FindOptions, Format, Found, Input, InputError,
    NextDocument, RECORDS, TEXT, TEXT_KEY, find,
};
use crate::error::Error;

/// No limit on the size of a document, because the whole text is held in memory.
const LIMIT: usize = usize::MAX >> 1;

/// Returns the path of the text and its documents. Each file or record is a document.
pub fn read(data: &DataConfig) -> Result<(PathBuf, TextDocuments), Error> {
    let path = path(data)?;
    if !path.exists() {
        return Err(DataError::Missing { path }.into());
    }
    if !path.is_file() && !path.is_dir() {
        return Err(DataError::NotText { path }.into());
    }
    let key = data.json_key.as_deref().unwrap_or(TEXT_KEY);
    let keys = [key.to_string()];
    // For the default text, read only text files, so that other files in the repository do not change it.
    let text: &[&[&str]] = match &data.path {
        Some(_) => &[&TEXT, &RECORDS],
        None => &[&TEXT],
    };
    let options = FindOptions {
        extensions: &data.extensions,
        default_extensions: text,
        format: Format::Auto,
        text: DocumentFormat::Whole,
        keys: &keys,
    };
    let Found { inputs, counts } = find(std::slice::from_ref(&path), &options)?;
    if data.json_key.is_some() && !inputs.iter().any(|input| input.format.has_keys()) {
        return Err(format!(
            "data.json_key (--json-key) = {key} requires JSON lines, Parquet or Arrow, but {} is text: remove it",
            path.display()
        )
        .into());
    }
    let mut documents = TextDocuments::default();
    for input in &inputs {
        read_input(input, &keys, &mut documents)?;
    }
    if counts.is_notable() {
        documents = documents.with_source(counts.to_string());
    }
    if data.split.is_some() {
        // The check of the settings rejects any other split of a text.
        documents = documents.without_held_out();
    }
    Ok((path, documents))
}

fn read_input(input: &Input, keys: &[String], to: &mut TextDocuments) -> Result<(), Error> {
    let name = input.name();
    let mut source = input.open(keys, LIMIT, &Arc::new(AtomicU64::new(0)))?;
    for number in 1.. {
        let bad = |source: BadDocument| {
            let place = DocumentPosition {
                file: Arc::clone(&name),
                number,
                unit: input.format.unit(),
            };
            format!("{place}: {source}")
        };
        let content = match source.next() {
            Ok(NextDocument::Document(content)) => content,
            Ok(NextDocument::TooLong) => return Err(bad(BadDocument::TooLong(LIMIT)).into()),
            Ok(NextDocument::End) => break,
            Err(source) => {
                let (action, path) = ("read", name.to_string());
                return Err(InputError::Io {
                    action,
                    path,
                    source,
                }
                .into());
            }
        };
        let texts = content.texts(keys).map_err(bad)?;
        for text in texts {
            if input.format.has_keys() {
                let number = format!(":{number}");
                to.push(&[&input.key, number.as_bytes()].concat(), text.as_bytes());
            } else {
                to.push(&input.key, text.as_bytes());
            }
        }
    }
    Ok(())
}

/// Returns the path of the text of the recipe, or of this repository.
fn path(data: &DataConfig) -> Result<PathBuf, Error> {
    if let Some(path) = &data.path {
        return Ok(path.canonicalize().unwrap_or_else(|_| path.clone()));
    }
    let cli = Path::new(env!("CARGO_MANIFEST_DIR"));
    match cli.parent().map(Path::canonicalize) {
        Some(Ok(checkout)) if checkout.join("burn-megatron/src/lib.rs").is_file() => Ok(checkout),
        _ => Err(
            "no text to train on: give --data FILE|FOLDER. (The default, the text of the repository, needs the \
             checkout that the program was built in.)"
                .into(),
        ),
    }
}
