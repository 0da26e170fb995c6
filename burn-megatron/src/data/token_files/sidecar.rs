//! What stands beside token files about how they were made.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

use crate::data::gpt::SamplingError;
use crate::data::indexed::with_ending;

/// What `PREFIX.json` says of `PREFIX.bin`; all of it may be missing, as Megatron writes no such file.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct Sidecar {
    /// The tokenizer, as the one who made the files describes it.
    pub tokenizer: Option<Value>,
    /// Tokens are below this.
    pub vocabulary: Option<usize>,
    /// The token that ends a document.
    pub eod: Option<i32>,
    /// The number of tokens.
    pub tokens: Option<u64>,
    /// The bytes of text that they were made of.
    pub bytes: Option<u64>,
}

impl Sidecar {
    /// Where it stands.
    pub fn path(prefix: &Path) -> PathBuf {
        with_ending(prefix, ".json")
    }

    /// What a file with this content says.
    ///
    /// # Errors
    ///
    /// What the reader of JSON found.
    pub fn parse(content: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(content)
    }

    /// Reads it; empty where there is none.
    ///
    /// # Errors
    ///
    /// [`SamplingError::Sidecar`] where it is not readable.
    pub fn read(prefix: &Path) -> Result<Self, SamplingError> {
        let path = Self::path(prefix);
        let read = match fs::read(&path) {
            Ok(text) => Self::parse(&text).map_err(|error| error.to_string()),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(error.to_string()),
        };
        read.map_err(|reason| SamplingError::Sidecar { path, reason })
    }

    /// Those of all files, which must not contradict one another.
    pub(super) fn of_all(prefixes: &[&Path]) -> Result<Vec<Self>, SamplingError> {
        let all = prefixes.iter().map(|prefix| Self::read(prefix));
        let all: Vec<_> = all.collect::<Result<_, _>>()?;
        let mut known: [Option<(&Path, String)>; 3] = Default::default();
        for (other, sidecar) in prefixes.iter().zip(&all) {
            for ((what, fact), known) in sidecar.facts().into_iter().zip(&mut known) {
                match (fact, &known) {
                    (Some(fact), None) => *known = Some((other, fact)),
                    (Some(second), Some((prefix, first))) if *first != second => {
                        return Err(SamplingError::Disagree {
                            prefix: prefix.to_path_buf(),
                            other: other.to_path_buf(),
                            what,
                            first: first.clone(),
                            second,
                        });
                    }
                    _ => {}
                }
            }
        }
        Ok(all)
    }

    /// What files of one tokenizer have in common.
    fn facts(&self) -> [(&'static str, Option<String>); 3] {
        [
            (
                "the tokenizer",
                self.tokenizer.as_ref().map(Value::to_string),
            ),
            ("the vocabulary", self.vocabulary.map(|x| x.to_string())),
            ("eod", self.eod.map(|eod| eod.to_string())),
        ]
    }

    fn bytes_per_token(&self) -> Option<(f64, f64)> {
        let (bytes, tokens) = (self.bytes?, self.tokens.filter(|tokens| *tokens > 0)?);
        Some((bytes as f64, tokens as f64))
    }
}

/// Bytes of text of a token, in the mixture of the weights; 1 where it is not known of all files.
pub(super) fn bytes_per_token(files: &[Sidecar], weights: Option<&[f64]>) -> f64 {
    let each = files.iter().map(Sidecar::bytes_per_token);
    let Some(each) = each.collect::<Option<Vec<_>>>() else {
        return 1.0;
    };
    match weights {
        Some(weights) => {
            let shares = each.iter().zip(weights);
            shares.map(|((bytes, tokens), w)| w * bytes / tokens).sum()
        }
        None => {
            let (bytes, tokens): (Vec<f64>, Vec<f64>) = each.into_iter().unzip();
            bytes.iter().sum::<f64>() / tokens.iter().sum::<f64>()
        }
    }
}
