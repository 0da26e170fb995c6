//! A saved model and its tokenizer.

use std::collections::BTreeMap;
use std::path::Path;

use burn_megatron::checkpoint::{Checkpoint, TensorSource};
use burn_megatron_data::tokenizer::Tokenizer;
use burn_megatron_generate::GenerateConfig;
use burn_megatron_models::hf::peft::is_peft_folder;
use burn_megatron_models::hf::{is_hf_folder, stored_hf_files};

use crate::error::Error;
use crate::family::{Families, Model};
use crate::model_folder::{base_of, lora_of, open_checkpoint};
use crate::resume_check;

/// The file name of a tokenizer.
const TOKENIZER: &str = "tokenizer.json";

/// Model on disk with its tokenizer.
pub struct SavedModel {
    /// The weights.
    pub source: Box<dyn TensorSource>,
    /// The model.
    pub model: Model,
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// Whether the special tokens of the tokenizer are added to a prompt.
    pub framed: bool,
}

impl SavedModel {
    /// Opens a checkpoint, a folder of checkpoints, a run folder, or a Hugging Face folder. `tokenizer` overrides its
    /// own tokenizer.
    pub fn open(path: &Path, tokenizer: Option<&str>, families: &Families) -> Result<Self, Error> {
        let given = tokenizer.map(Tokenizer::named).transpose()?;
        if is_hf_folder(path) {
            let (model, source) = families.hf(path)?.open(path)?;
            let tokenizer = match given {
                Some(tokenizer) => tokenizer,
                None => Tokenizer::open(path)?,
            };
            return Self {
                model,
                source,
                tokenizer,
                framed: true,
            }
            .checked();
        }
        if is_peft_folder(path) {
            return Self::of_peft(path, given, families);
        }
        let checkpoint = open_checkpoint(path)?;
        let model = families.model_of(&checkpoint)?;
        let kept = stored_hf_files(&checkpoint)?;
        let tokenizer = match given {
            Some(tokenizer) => tokenizer,
            None => own_tokenizer(&checkpoint, &kept, model.vocabulary())?,
        };
        // A converted checkpoint behaves like its Hugging Face folder.
        let framed = resume_check::special_tokens(&checkpoint).unwrap_or(!kept.is_empty());
        let source = match lora_of(&checkpoint)? {
            Some(_) => families.open(path)?.1,
            None => Box::new(checkpoint),
        };
        Self {
            source,
            model,
            tokenizer,
            framed,
        }
        .checked()
    }

    /// Opens a folder of adapters, with the tokenizer of the base model.
    fn of_peft(path: &Path, given: Option<Tokenizer>, families: &Families) -> Result<Self, Error> {
        let (model, source) = families.open(path)?;
        let base = base_of(path)?;
        let saved = match given {
            Some(tokenizer) => Self {
                source,
                model,
                tokenizer,
                framed: is_hf_folder(&base),
            },
            None => Self {
                source,
                model,
                ..Self::open(&base, None, families)?
            },
        };
        saved.checked()
    }

    /// Returns the tokens of a prompt, with the special tokens that the model's training texts have.
    pub fn prompt_tokens(&self, prompt: &str) -> Result<Vec<u32>, Error> {
        let config = GenerateConfig {
            prompt: prompt.into(),
            special_tokens: self.framed,
            ..GenerateConfig::default()
        };
        Ok(config.prompt_tokens(&self.tokenizer)?)
    }

    /// Checks the vocabulary. A model may have more tokens than its tokenizer, as padding, but not fewer.
    fn checked(self) -> Result<Self, Error> {
        let (model, tokenizer) = (self.model.vocabulary(), self.tokenizer.vocabulary());
        if tokenizer <= model {
            Ok(self)
        } else {
            Err(format!(
                "the tokenizer {} has {tokenizer} tokens, more than the {model} tokens of the model: expected the \
                 tokenizer of the model",
                self.tokenizer.name()
            )
            .into())
        }
    }
}

/// Returns the tokenizer of a checkpoint: the tokenizer that its recipe names, else the stored tokenizer, else bytes
/// if the vocabulary size matches.
fn own_tokenizer(
    checkpoint: &Checkpoint,
    kept: &BTreeMap<String, Vec<u8>>,
    vocabulary: usize,
) -> Result<Tokenizer, Error> {
    let recipe = &checkpoint.metadata().config;
    let path = checkpoint.path();
    match recipe["data"]["tokenizer"].as_str() {
        Some(name) => Ok(Tokenizer::named(name)?),
        None if kept.contains_key(TOKENIZER) => Ok(Tokenizer::from_files(path, kept)?),
        None if vocabulary == Tokenizer::bytes().vocabulary() => Ok(Tokenizer::bytes()),
        None => Err(format!(
            "{} does not name the tokenizer of its {vocabulary} tokens; give --tokenizer",
            path.display()
        )
        .into()),
    }
}
