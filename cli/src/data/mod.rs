//! Opens the data of a recipe.

#[cfg_attr(not(feature = "tokenizers"), path = "no_chat.rs")]
mod chat;
pub mod settings;
#[cfg(test)]
mod tests;
mod text;

use std::sync::Arc;

use burn_megatron_data::tokenizer::{BYTES, TokenFileInfo, Tokenizer};
use burn_megatron_data::{Dataset, Sampling, TextData, TokenFilesConfig, TokenizedText};
use burn_megatron_generate::GenerateConfig;

use crate::error::Error;
use crate::recipe::Recipe;

/// The number of held-out bytes in a prompt.
const PROMPT_BYTES: usize = 24;
const PROMPT_TOKENS: usize = 8;

/// Opens the data of the recipe, and checks that it fits the run.
pub fn open(recipe: &Recipe) -> Result<Arc<dyn Dataset>, Error> {
    recipe.data.check()?;
    let tokenizer = tokenizer(recipe)?;
    let train = &recipe.train;
    let seq = recipe.sequence_length();
    let files = !recipe.data.files.is_empty();
    let data: Arc<dyn Dataset> = match (&tokenizer, files) {
        (Some(tokenizer), false) if let Some(chat) = &recipe.data.chat => {
            train.check_conversations()?;
            chat.open(tokenizer, seq)?
        }
        (_, true) => Arc::new(token_files(recipe, tokenizer.as_ref())?.open()?),
        (Some(tokenizer), false) if !tokenizer.is_bytes() => {
            recipe.data.check_tokens()?;
            let (path, documents) = text::read(&recipe.data)?;
            let special = recipe.data.adds_special_tokens();
            let text = TokenizedText::from_documents(&path, &documents, tokenizer, special);
            Arc::new(text?)
        }
        (_, false) => {
            recipe.data.check_bytes()?;
            let (path, documents) = text::read(&recipe.data)?;
            let text = TextData::from_documents(&path, documents)?;
            Arc::new(recipe.data.with_documents(text))
        }
    };
    check_vocabulary(recipe.model.vocabulary(), &*data, tokenizer.as_ref())?;
    data.training(&Sampling {
        seq,
        seed: train.seed,
        samples: train.samples(),
    })?;
    data.held_out(seq, train.held_out_samples)?;
    Ok(data)
}

/// Returns the tokenizer of the recipe. For token files, it is the tokenizer that their metadata names. Returns
/// `None` if the tokenizer of token files is unknown or missing.
pub fn tokenizer(recipe: &Recipe) -> Result<Option<Tokenizer>, Error> {
    let data = &recipe.data;
    let Some(files) = data.files.first() else {
        let name = data.tokenizer.as_deref();
        return Ok(Some(
            name.map_or_else(|| Ok(Tokenizer::bytes()), Tokenizer::named)?,
        ));
    };
    let info = TokenFileInfo::read(files.prefix())?;
    let made_with = |tokenizer: &Tokenizer| {
        let info = info.as_ref();
        info.is_none_or(|info| info.is_of(tokenizer))
    };
    match (&data.tokenizer, &info) {
        (Some(name), _) => {
            let tokenizer = Tokenizer::named(name)?;
            if made_with(&tokenizer) {
                Ok(Some(tokenizer))
            } else {
                Err(format!(
                    "data.tokenizer (--tokenizer) = {name} is not the tokenizer of {}: expected {}",
                    files.prefix().display(),
                    info.and_then(|info| info.tokenizer_path)
                        .unwrap_or_default(),
                )
                .into())
            }
        }
        (None, Some(info)) => {
            let name = info.tokenizer_path.as_deref();
            let tokenizer = name.and_then(|name| Tokenizer::named(name).ok());
            Ok(tokenizer.filter(made_with))
        }
        (None, None) => Ok(None),
    }
}

/// Returns the vocabulary size of the data, if it is known before the data is read: from the metadata of token files,
/// or from the tokenizer.
pub fn known_vocabulary(recipe: &Recipe) -> Result<Option<usize>, Error> {
    let data = &recipe.data;
    let mut known = None;
    for files in &data.files {
        let info = TokenFileInfo::read(files.prefix())?;
        known = known.max(info.and_then(|info| info.vocabulary));
    }
    if known.is_none() && data.tokenizer.is_some() {
        known = tokenizer(recipe)?.map(|tokenizer| tokenizer.vocabulary());
    }
    Ok(known)
}

/// Returns whether the documents of the data have the special tokens of their tokenizer. Returns `None` if this is
/// unknown, for bytes, and for conversations, whose template writes special tokens.
pub fn special_tokens(recipe: &Recipe) -> Result<Option<bool>, Error> {
    let data = &recipe.data;
    let is_bytes = data.tokenizer.as_deref().is_none_or(|name| name == BYTES);
    Ok(match data.files.first() {
        Some(files) => TokenFileInfo::read(files.prefix())?.and_then(|info| info.special_tokens),
        None if data.chat.is_some() || is_bytes => None,
        None => Some(data.adds_special_tokens()),
    })
}

/// Returns the settings of the sample at the end of the run. An empty prompt is replaced by the beginning of the
/// held-out data.
pub fn sample(
    recipe: &Recipe,
    data: &dyn Dataset,
    tokenizer: Option<&Tokenizer>,
) -> Result<GenerateConfig, Error> {
    let mut sample = recipe.sample.clone();
    sample.special_tokens = special_tokens(recipe)?.unwrap_or(false);
    if let Some(tokenizer) = tokenizer.filter(|_| sample.prompt.is_empty()) {
        let held_out = recipe.train.held_out_samples.min(1);
        let held_out = data.held_out(recipe.sequence_length(), held_out)?;
        let tokens = held_out.first().map(|sample| &sample.tokens[..]);
        let most = if tokenizer.is_bytes() {
            PROMPT_BYTES
        } else {
            PROMPT_TOKENS
        };
        let tokens = tokens.unwrap_or_default().iter().take(most);
        let tokens: Vec<_> = tokens
            .filter_map(|token| u32::try_from(*token).ok())
            .collect();
        let text = tokenizer.decode(&tokens)?;
        // The bytes may begin and end within a character, and a document may end within them.
        let text = text.trim_matches(['\u{fffd}', '\0']);
        sample.prompt = text.split('\0').next().unwrap_or_default().into();
    }
    Ok(sample)
}

/// Returns the tokenizer of the sample at the end of the run, if a sample is generated.
///
/// # Errors
/// Returns an error if the tokenizer of the data is unknown or does not fit.
pub fn sample_tokenizer(recipe: &Recipe) -> Result<Option<Tokenizer>, Error> {
    let sample = &recipe.sample;
    if sample.tokens == 0 {
        return Ok(None);
    }
    let Some(tokenizer) = tokenizer(recipe)? else {
        return Err(format!(
            "sample.tokens = {} requires a tokenizer, and the tokenizer of the token files is unknown or missing; set \
             data.tokenizer (--tokenizer), or set sample.tokens to 0",
            sample.tokens
        )
        .into());
    };
    let (needed, model) = (tokenizer.vocabulary(), recipe.model.vocabulary());
    if needed > model {
        return Err(format!(
            "invalid model.vocabulary = {model}: expected at least {needed}, the tokens of data.tokenizer \
             (--tokenizer)"
        )
        .into());
    }
    sample.prompt_tokens(&tokenizer)?;
    Ok(Some(tokenizer))
}

/// Returns the configuration of the token files of the recipe.
fn token_files(recipe: &Recipe, tokenizer: Option<&Tokenizer>) -> Result<TokenFilesConfig, Error> {
    let data = &recipe.data;
    let mut config = data.token_files()?;
    let beside = TokenFileInfo::read(data.files[0].prefix())?.unwrap_or_default();
    if beside.vocabulary.is_none() {
        // Every token that is read is checked against the vocabulary.
        let known = tokenizer.map(Tokenizer::vocabulary);
        config.vocabulary = Some(known.unwrap_or(recipe.model.vocabulary()));
        let eod = tokenizer
            .and_then(Tokenizer::eod)
            .filter(|_| beside.eod.is_none());
        config.eod = eod.map(|eod| eod as i32);
    }
    if let Some(eod) = data.eod {
        config.eod = Some(i32::try_from(eod)?);
    }
    Ok(config)
}

/// Checks that the vocabulary of the model covers every token. For bytes, the size must be exact.
fn check_vocabulary(
    model: usize,
    data: &dyn Dataset,
    tokenizer: Option<&Tokenizer>,
) -> Result<(), Error> {
    let needed = data.vocabulary();
    let bytes = tokenizer.is_some_and(Tokenizer::is_bytes);
    match (bytes, model >= needed) {
        (true, _) if model != needed => Err(format!(
            "invalid model.vocabulary = {model}: expected {needed} for bytes; or set data.tokenizer (--tokenizer) to one \
             with {model} tokens"
        )
        .into()),
        (false, false) => Err(format!(
            "invalid model.vocabulary = {model}: expected at least {needed}, because the tokens of the data are below \
             {needed}"
        )
        .into()),
        _ => Ok(()),
    }
}

/// Returns the unit of the loss of this data: per byte if a byte is a token.
pub fn unit(data: &dyn Dataset) -> LossUnit {
    match (data.bytes_per_token() == 1.0, data.vocabulary()) {
        (true, burn_megatron_data::VOCABULARY) => LossUnit::Byte,
        (true, _) => LossUnit::Token,
        (false, _) => LossUnit::TokenOfBytes,
    }
}

/// Unit of a loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossUnit {
    /// Tokens are bytes.
    Byte,
    /// The number of bytes per token is unknown.
    Token,
    /// The number of bytes per token is known.
    TokenOfBytes,
}

impl LossUnit {
    /// Formats a loss: in nats per token, and in bits.
    pub fn show(self, nats: f64, bits: f64) -> String {
        match self {
            Self::Byte => format!("{nats:.4} nats per byte ({bits:.4} bits)"),
            Self::Token => format!("{nats:.4} nats per token ({bits:.4} bits)"),
            Self::TokenOfBytes => format!("{nats:.4} nats per token ({bits:.4} bits per byte)"),
        }
    }

    /// Returns the unit of a loss in bits.
    pub fn bits_unit(self) -> &'static str {
        match self {
            Self::Byte | Self::TokenOfBytes => "byte",
            Self::Token => "token",
        }
    }
}
