//! Reads the special tokens of a tokenizer from the files next to it.

use std::collections::{BTreeMap, HashMap};
use std::io::ErrorKind;
use std::path::Path;

use serde_json::Value;

use super::{MAX_FILE_BYTES, TokenizerError};
use burn_megatron::regular_file;

/// The ids of the special tokens of a tokenizer. A token that is unknown is `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// The beginning-of-sequence token.
    pub bos: Option<u32>,
    /// The end-of-sequence token.
    pub eos: Option<u32>,
    /// The end-of-document token. It is equal to `eos`, unless it is set to another token.
    pub eod: Option<u32>,
    /// The padding token.
    pub pad: Option<u32>,
    /// All tokens that end generation, including `eos`. A chat model may use different tokens for the end of a turn and
    /// the end of a document.
    pub stop_tokens: Vec<u32>,
}

/// Files with tokens as text, in order of precedence.
const TOKEN_FILES: [&str; 2] = ["tokenizer_config.json", "special_tokens_map.json"];

/// Files with token ids, in order of precedence.
const TOKEN_ID_FILES: [&str; 2] = ["generation_config.json", "config.json"];

/// Reads the existing files in `folder`, and returns their contents by name.
pub(super) fn beside(folder: &Path) -> Result<BTreeMap<String, Vec<u8>>, TokenizerError> {
    let mut found = BTreeMap::new();
    for file in TOKEN_FILES.into_iter().chain(TOKEN_ID_FILES) {
        let path = folder.join(file);
        match regular_file::read(&path, MAX_FILE_BYTES) {
            Ok(content) => drop(found.insert(file.into(), content)),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(source) => return Err(TokenizerError::unreadable(&path, source)),
        }
    }
    Ok(found)
}

/// Finds the special tokens in the contents of the files of `folder`.
pub(super) fn parse(
    folder: &Path,
    contents: &BTreeMap<String, Vec<u8>>,
    vocabulary: &HashMap<String, u32>,
) -> Result<SpecialTokens, TokenizerError> {
    let files = SpecialTokenFiles {
        folder,
        vocabulary,
        largest: vocabulary.values().max().copied().unwrap_or(0),
        written: objects(folder, contents, TOKEN_FILES)?,
        numbered: objects(folder, contents, TOKEN_ID_FILES)?,
    };
    let eos = files.token("eos_token", "eos_token_id")?;
    let mut stop_tokens = eos.clone();
    stop_tokens.extend(files.numbers("eos_token_id")?);
    stop_tokens.sort_unstable();
    stop_tokens.dedup();
    let first = |tokens: Vec<u32>| tokens.first().copied();
    Ok(SpecialTokens {
        bos: first(files.token("bos_token", "bos_token_id")?),
        pad: first(files.token("pad_token", "pad_token_id")?),
        eod: eos.first().copied(),
        eos: first(eos),
        stop_tokens,
    })
}

struct SpecialTokenFiles<'a> {
    folder: &'a Path,
    vocabulary: &'a HashMap<String, u32>,
    largest: u32,
    written: Vec<(&'static str, Value)>,
    numbered: Vec<(&'static str, Value)>,
}

impl SpecialTokenFiles<'_> {
    /// Returns the token that is given as text, otherwise the ids.
    fn token(&self, name: &'static str, number: &'static str) -> Result<Vec<u32>, TokenizerError> {
        for (file, object) in &self.written {
            // A token is a string, or an object with further properties.
            let value = &object[name];
            let written = value.as_str().or_else(|| value["content"].as_str());
            if let Some(written) = written {
                let id = self
                    .vocabulary
                    .get(written)
                    .ok_or_else(|| self.unknown(file, name, written))?;
                return Ok(vec![*id]);
            }
        }
        self.numbers(number)
    }

    /// Returns the ids in the first file that has ids.
    fn numbers(&self, name: &'static str) -> Result<Vec<u32>, TokenizerError> {
        for (file, object) in &self.numbered {
            let value = &object[name];
            let values = match value {
                Value::Null => continue,
                Value::Array(values) => values.as_slice(),
                one => std::slice::from_ref(one),
            };
            let checked = values.iter().map(|value| {
                let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
                id.filter(|id| *id <= self.largest)
                    .ok_or_else(|| self.unknown(file, name, &value.to_string()))
            });
            return checked.collect();
        }
        Ok(vec![])
    }

    fn unknown(&self, file: &str, what: &'static str, token: &str) -> TokenizerError {
        TokenizerError::UnknownToken {
            path: self.folder.join(file),
            what,
            token: token.into(),
        }
    }
}

/// Parses the existing files.
fn objects(
    folder: &Path,
    contents: &BTreeMap<String, Vec<u8>>,
    files: [&'static str; 2],
) -> Result<Vec<(&'static str, Value)>, TokenizerError> {
    let there = files
        .into_iter()
        .filter_map(|file| Some((file, contents.get(file)?)));
    let read = there.map(|(file, content)| {
        let object = serde_json::from_slice(content)
            .map_err(|source| TokenizerError::invalid(&folder.join(file), source))?;
        Ok((file, object))
    });
    read.collect()
}
