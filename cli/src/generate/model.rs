//! The model that writes, and its tokens.

use std::collections::BTreeMap;
use std::path::Path;

use burn_megatron::checkpoint::{Checkpoint, TensorSource};
use burn_megatron::tokenizer::Tokenizer;
use burn_megatron_models::TransformerConfig;
use burn_megatron_models::hf::{HfFolder, is_hf_folder, kept_files, model_of};

use crate::recipe::Error;

/// The file of a tokenizer.
const TOKENIZER: &str = "tokenizer.json";

/// A model on the disk, with its tokenizer.
pub struct SavedModel {
    /// Its weights.
    pub source: Box<dyn TensorSource>,
    /// What they are of.
    pub config: TransformerConfig,
    /// What it reads and writes.
    pub tokenizer: Tokenizer,
    /// Whether a prompt is framed by the tokens that the tokenizer puts around a text.
    pub framed: bool,
}

impl SavedModel {
    /// Opens a checkpoint, a folder of them or of a run, or a folder of Hugging Face; `tokenizer` takes
    /// the place of its own.
    pub fn open(path: &Path, tokenizer: Option<&str>) -> Result<Self, Error> {
        let given = tokenizer.map(Tokenizer::named).transpose()?;
        if is_hf_folder(path) {
            let folder = HfFolder::open(path)?;
            let tokenizer = match given {
                Some(tokenizer) => tokenizer,
                None => Tokenizer::open(path)?,
            };
            return Self {
                config: folder.config().model.clone(),
                source: Box::new(folder),
                tokenizer,
                framed: true,
            }
            .checked();
        }
        let checkpoint = Checkpoint::open(path)?;
        let config = model_of(&checkpoint)?;
        let kept = kept_files(&checkpoint)?;
        let tokenizer = match given {
            Some(tokenizer) => tokenizer,
            None => own_tokenizer(&checkpoint, &kept, config.vocabulary)?,
        };
        Self {
            source: Box::new(checkpoint),
            config,
            tokenizer,
            // One that was converted is as the folder that it was.
            framed: !kept.is_empty(),
        }
        .checked()
    }

    /// A model may have more tokens than its tokenizer, to fill up, but not fewer.
    fn checked(self) -> Result<Self, Error> {
        let (model, tokenizer) = (self.config.vocabulary, self.tokenizer.vocabulary());
        match tokenizer <= model {
            true => Ok(self),
            false => Err(format!(
                "the tokenizer {} has {tokenizer} tokens and the model {model}: it is of another model",
                self.tokenizer.name()
            )
            .into()),
        }
    }
}

/// The tokenizer that the recipe of a checkpoint names, else the one that it keeps, else bytes where there
/// are as many.
fn own_tokenizer(
    checkpoint: &Checkpoint,
    kept: &BTreeMap<String, Vec<u8>>,
    vocabulary: usize,
) -> Result<Tokenizer, Error> {
    let recipe = &checkpoint.about().config;
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
