//! Reads a chat template and its special tokens.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::super::{MAX_FILE_BYTES, Tokenizer, TokenizerError};
use super::{ChatTemplateError, NAMES};
use burn_megatron::regular_file;
use burn_megatron::regular_file::is_there;

/// The name of a template file.
const FILE: &str = "chat_template.jinja";

/// The tokenizer configuration, which may contain the template, and the file with the special tokens in older folders.
const CONFIGS: [&str; 2] = ["tokenizer_config.json", "special_tokens_map.json"];

/// The special tokens that a template may write, with their names in `transformers`.
const SPECIAL: [&str; 7] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
];

/// The text of one or two templates.
pub(super) struct TemplateSource {
    /// The path from which it was read.
    pub name: String,
    /// The templates, with their names in [`NAMES`].
    pub templates: Vec<(&'static str, String)>,
}

impl TemplateSource {
    /// Reads the template in a file.
    pub fn read(file: &Path) -> Result<Self, ChatTemplateError> {
        let text = regular_file::read_text(file, MAX_FILE_BYTES);
        let text = text.map_err(|source| ChatTemplateError::Unreadable {
            path: file.into(),
            source,
        })?;
        Ok(Self {
            name: file.display().to_string(),
            templates: vec![(NAMES[0], text)],
        })
    }

    /// Reads the template in a tokenizer's folder.
    pub fn beside(tokenizer: &Tokenizer) -> Result<Option<Self>, ChatTemplateError> {
        let Some(folder) = folder(tokenizer) else {
            return Ok(None);
        };
        let file = folder.join(FILE);
        if is_there(&file) {
            return Self::read(&file).map(Some);
        }
        let path = folder.join(CONFIGS[0]);
        let templates = match &config(&path)?["chat_template"] {
            Value::Null => return Ok(None),
            Value::String(text) => vec![(NAMES[0], text.clone())],
            several => NAMES
                .iter()
                .filter_map(|name| Some((*name, named(several, name)?)))
                .collect(),
        };
        if templates.iter().all(|(name, _)| *name != NAMES[0]) {
            return Err(ChatTemplateError::Config { path });
        }
        let name = path.display().to_string();
        Ok(Some(Self { name, templates }))
    }
}

/// Returns the template with this name in a list of templates.
fn named(several: &Value, name: &str) -> Option<String> {
    let found = several
        .as_array()?
        .iter()
        .find(|one| one["name"] == *name)?;
    Some(found["template"].as_str()?.into())
}

/// Returns the special tokens by name. Each token comes from the first file that has it.
pub(super) fn special_tokens(
    tokenizer: &Tokenizer,
) -> Result<Vec<(String, String)>, TokenizerError> {
    let Some(folder) = folder(tokenizer) else {
        // A zero byte ends a document of bytes.
        return Ok(vec![("eos_token".into(), "\0".into())]);
    };
    let files = CONFIGS.map(|file| config(&folder.join(file)));
    let [first, second] = files;
    let files = [first?, second?];
    let token = |name: &str| {
        let of = |file: &Value| {
            let value = &file[name];
            let text = value.as_str().or_else(|| value["content"].as_str());
            text.map(String::from)
        };
        Some((name.to_string(), files.iter().find_map(of)?))
    };
    Ok(SPECIAL.iter().filter_map(|name| token(name)).collect())
}

/// Returns the folder of a tokenizer; `None` for bytes.
fn folder(tokenizer: &Tokenizer) -> Option<PathBuf> {
    if tokenizer.is_bytes() {
        return None;
    }
    let path = Path::new(tokenizer.name());
    let file = || path.parent().unwrap_or(Path::new(".")).to_path_buf();
    Some(if path.is_dir() {
        path.to_path_buf()
    } else {
        file()
    })
}

/// Reads a JSON file; returns null if there is no file.
fn config(path: &Path) -> Result<Value, TokenizerError> {
    match regular_file::read(path, MAX_FILE_BYTES) {
        Ok(content) => {
            serde_json::from_slice(&content).map_err(|source| TokenizerError::invalid(path, source))
        }
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Value::Null),
        Err(source) => Err(TokenizerError::unreadable(path, source)),
    }
}
