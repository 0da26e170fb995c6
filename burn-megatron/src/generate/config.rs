//! How text is drawn.

use serde::{Deserialize, Serialize};

use crate::tokenizer::{Tokenizer, TokenizerError};

/// How text is drawn.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GenerateConfig {
    /// What the text begins with.
    pub prompt: String,
    /// The most tokens to draw; 0 draws none.
    pub tokens: usize,
    /// Logits are divided by it: below 1 likelier tokens become likelier still. 0 takes the likeliest.
    pub temperature: f64,
    /// Only so many of the likeliest tokens are drawn from; all where not given.
    pub top_k: Option<usize>,
    /// Only the likeliest tokens are drawn from whose probabilities together reach this, of those that
    /// `top_k` leaves; all where not given.
    pub top_p: Option<f64>,
    /// The text ends before the first of these, wherever the borders between its tokens are.
    pub stop: Vec<String>,
    /// Seed of the draws; where not given that of the run, or 0.
    pub seed: Option<u64>,
}

impl Default for GenerateConfig {
    fn default() -> Self {
        Self {
            prompt: "pub fn ".into(),
            tokens: 200,
            temperature: 0.7,
            top_k: None,
            top_p: None,
            stop: vec![],
            seed: None,
        }
    }
}

/// Settings that draw no text.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum GenerateConfigError {
    /// The temperature.
    #[error("temperature = {0} draws no text; 0, which takes the likeliest token, and more do")]
    Temperature(f64),
    /// No tokens to draw from.
    #[error("top_k = 0 leaves no token to draw; 1 and more do")]
    TopK,
    /// No probability to draw from.
    #[error("top_p = {0} is no part of the probability; above 0 and at most 1 is")]
    TopP(f64),
    /// A text that is everywhere.
    #[error("an empty text in stop would end every text at once; leave it out")]
    Stop,
}

impl GenerateConfig {
    /// Checks the settings.
    ///
    /// # Errors
    ///
    /// [`GenerateConfigError`] for the first that draws no text.
    pub fn check(&self) -> Result<(), GenerateConfigError> {
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return Err(GenerateConfigError::Temperature(self.temperature));
        }
        if self.top_k == Some(0) {
            return Err(GenerateConfigError::TopK);
        }
        if let Some(top_p) = self.top_p.filter(|p| !(*p > 0.0 && *p <= 1.0)) {
            return Err(GenerateConfigError::TopP(top_p));
        }
        match self.stop.iter().any(String::is_empty) {
            true => Err(GenerateConfigError::Stop),
            false => Ok(()),
        }
    }

    /// The tokens of the prompt. An empty one is the token that begins a text, or that ends the document
    /// before it, or a line break.
    ///
    /// # Errors
    ///
    /// [`TokenizerError`] where the tokenizer has none for it.
    pub fn prompt_tokens(&self, tokenizer: &Tokenizer) -> Result<Vec<u32>, TokenizerError> {
        let tokens = tokenizer.encode(&self.prompt)?;
        let special = tokenizer.special();
        let first = special.bos.or(special.eod);
        match (tokens.is_empty(), first) {
            (false, _) => Ok(tokens),
            (true, Some(first)) if !tokenizer.is_bytes() => Ok(vec![first]),
            (true, _) => tokenizer.encode("\n"),
        }
    }
}
