//! The tokens that begin and end texts, from the files beside a tokenizer.

use std::collections::{BTreeMap, HashMap};
use std::io::ErrorKind;
use std::path::Path;

use serde_json::Value;

use super::{LARGEST_FILE, TokenizerError};
use crate::bounded;

/// The tokens that begin and end texts, where they are known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// Begins a text.
    pub bos: Option<u32>,
    /// Ends a text.
    pub eos: Option<u32>,
    /// Stands between documents; `eos` unless another one is asked for.
    pub eod: Option<u32>,
    /// Fills up rows.
    pub pad: Option<u32>,
    /// All tokens after which a generated text is done, `eos` among them: a chat ends its turns with
    /// others than its documents.
    pub ends: Vec<u32>,
}

/// Where a token may be written, the strongest first.
const WRITTEN: [&str; 2] = ["tokenizer_config.json", "special_tokens_map.json"];

/// Where it may be a number, or several; the model's own file is weaker than that for generation.
const NUMBERED: [&str; 2] = ["generation_config.json", "config.json"];

/// The files of `folder`, by name, as far as they are there.
pub(super) fn beside(folder: &Path) -> Result<BTreeMap<String, Vec<u8>>, TokenizerError> {
    let mut found = BTreeMap::new();
    for file in WRITTEN.into_iter().chain(NUMBERED) {
        let path = folder.join(file);
        match bounded::read(&path, LARGEST_FILE) {
            Ok(content) => drop(found.insert(file.into(), content)),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(source) => return Err(TokenizerError::unreadable(&path, source)),
        }
    }
    Ok(found)
}

/// What the files of `folder` say, of which these are the contents.
pub(super) fn parse(
    folder: &Path,
    contents: &BTreeMap<String, Vec<u8>>,
    vocabulary: &HashMap<String, u32>,
) -> Result<SpecialTokens, TokenizerError> {
    let files = Files {
        folder,
        vocabulary,
        largest: vocabulary.values().max().copied().unwrap_or(0),
        written: objects(folder, contents, WRITTEN)?,
        numbered: objects(folder, contents, NUMBERED)?,
    };
    let eos = files.token("eos_token", "eos_token_id")?;
    let mut ends = eos.clone();
    ends.extend(files.numbers("eos_token_id")?);
    ends.sort_unstable();
    ends.dedup();
    let first = |tokens: Vec<u32>| tokens.first().copied();
    Ok(SpecialTokens {
        bos: first(files.token("bos_token", "bos_token_id")?),
        pad: first(files.token("pad_token", "pad_token_id")?),
        eod: eos.first().copied(),
        eos: first(eos),
        ends,
    })
}

struct Files<'a> {
    folder: &'a Path,
    vocabulary: &'a HashMap<String, u32>,
    largest: u32,
    written: Vec<(&'static str, Value)>,
    numbered: Vec<(&'static str, Value)>,
}

impl Files<'_> {
    /// The token as it is written where it is, else the numbers.
    fn token(&self, name: &'static str, number: &'static str) -> Result<Vec<u32>, TokenizerError> {
        for (file, object) in &self.written {
            // A token is written as a string, or as an object that has further properties of it.
            let value = &object[name];
            let written = value.as_str().or_else(|| value["content"].as_str());
            if let Some(written) = written {
                let id = self.vocabulary.get(written);
                let id = id.ok_or_else(|| self.unknown(file, name, written))?;
                return Ok(vec![*id]);
            }
        }
        self.numbers(number)
    }

    /// The numbers of the first file that has any.
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

/// Those of the files that are there.
fn objects(
    folder: &Path,
    contents: &BTreeMap<String, Vec<u8>>,
    files: [&'static str; 2],
) -> Result<Vec<(&'static str, Value)>, TokenizerError> {
    let there = files.into_iter();
    let there = there.filter_map(|file| Some((file, contents.get(file)?)));
    let read = there.map(|(file, content)| {
        let object = serde_json::from_slice(content)
            .map_err(|source| TokenizerError::invalid(&folder.join(file), source))?;
        Ok((file, object))
    });
    read.collect()
}
