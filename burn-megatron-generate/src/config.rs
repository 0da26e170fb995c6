//! Settings of text generation.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use burn_megatron_data::tokenizer::{Tokenizer, TokenizerError};

/// The maximum number of texts per prompt.
const MAX_SAMPLES: usize = 1 << 16;

/// Settings of text generation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct GenerateConfig {
    /// The prompt.
    pub prompt: String,
    /// The maximum number of new tokens; 0 generates none.
    pub tokens: usize,
    /// The sampling temperature: logits are divided by this number. 0 selects the most likely token (greedy).
    pub temperature: f64,
    /// Top-k sampling: samples from the `top_k` most likely tokens, or from all tokens if `None`.
    pub top_k: Option<usize>,
    /// Nucleus (top-p) sampling: samples from the most likely tokens of `top_k` whose probabilities reach this sum, or
    /// from all tokens if `None`.
    pub top_p: Option<f64>,
    /// Stop strings: the text ends before the first of these strings, even across token boundaries.
    pub stop: Vec<String>,
    /// The seed; by default the seed of the run, or 0. All prompts of a batch use the same seed.
    pub seed: Option<u64>,
    /// The number of texts per prompt (`num_return_sequences` of `transformers`). Sample `i` draws from stream `i` of
    /// the seed, so it does not depend on the number of samples. This is not a setting of a recipe.
    #[serde(skip)]
    pub samples: usize,
    /// Whether the log-probabilities of the new tokens are returned. They require another multiplication with the
    /// weights of the output layer.
    pub logprobs: bool,
    /// Whether a model with multi-token prediction drafts an additional token (speculative decoding). The next forward
    /// reads the draft together with the next token, and yields two tokens if the model draws the draft itself. The
    /// text does not change, provided that the logits do not depend on the other tokens of a forward, as on the CPU.
    pub speculative: bool,
    /// Whether the tokenizer adds its special tokens to the prompt, as it does to training texts. This is not a setting
    /// of a recipe.
    #[serde(skip)]
    pub special_tokens: bool,
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
            samples: 1,
            logprobs: false,
            speculative: false,
            special_tokens: false,
        }
    }
}

/// An invalid setting of generation.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum GenerateConfigError {
    /// An invalid temperature.
    #[error("invalid temperature = {0}: expected at least 0, which takes the most likely token")]
    Temperature(f64),
    /// `top_k` leaves no tokens to sample from.
    #[error("invalid top_k = 0: expected at least 1")]
    TopK,
    /// An invalid probability.
    #[error("invalid top_p = {0}: expected above 0 and at most 1")]
    TopP(f64),
    /// The number of samples is zero or too large.
    #[error("invalid samples = {0}: expected 1 to {MAX_SAMPLES}")]
    Samples(usize),
    /// Several samples are requested at temperature 0, where all samples are equal.
    #[error(
        "samples = {0} conflicts with temperature = 0, which takes the most likely token: set a temperature above 0"
    )]
    EqualSamples(usize),
    /// A stop string is empty.
    #[error("an empty string in stop would end every text at once: leave it out")]
    Stop,
}

impl GenerateConfig {
    /// Checks the settings.
    ///
    /// ```
    /// use burn_megatron_generate::{GenerateConfig, GenerateConfigError};
    ///
    /// let config = GenerateConfig { top_k: Some(40), samples: 2, ..GenerateConfig::default() };
    /// let greedy = GenerateConfig { temperature: 0.0, ..config };
    /// assert_eq!(greedy.check(), Err(GenerateConfigError::EqualSamples(2)));
    /// GenerateConfig { samples: 1, ..greedy }.check()?;
    /// # Ok::<(), GenerateConfigError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`GenerateConfigError`] for the first invalid setting.
    pub fn check(&self) -> Result<(), GenerateConfigError> {
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return Err(GenerateConfigError::Temperature(self.temperature));
        }
        if !(1..=MAX_SAMPLES).contains(&self.samples) {
            return Err(GenerateConfigError::Samples(self.samples));
        }
        if self.samples > 1 && self.temperature == 0.0 {
            return Err(GenerateConfigError::EqualSamples(self.samples));
        }
        if self.top_k == Some(0) {
            return Err(GenerateConfigError::TopK);
        }
        if let Some(top_p) = self.top_p.filter(|p| !(*p > 0.0 && *p <= 1.0)) {
            return Err(GenerateConfigError::TopP(top_p));
        }
        if self.stop.iter().any(String::is_empty) {
            Err(GenerateConfigError::Stop)
        } else {
            Ok(())
        }
    }

    /// Encodes the prompt. An empty prompt becomes the tokenizer's `bos` token, or else its `eod` token, or else a line
    /// break.
    ///
    /// # Errors
    ///
    /// [`TokenizerError`] if the tokenizer cannot encode the prompt.
    pub fn prompt_tokens(&self, tokenizer: &Tokenizer) -> Result<Vec<u32>, TokenizerError> {
        let tokens = match self.special_tokens {
            true => tokenizer.encode_with_special_tokens(&self.prompt)?,
            false => tokenizer.encode(&self.prompt)?,
        };
        let special = tokenizer.special();
        let first = special.bos.or(special.eod);
        match (tokens.is_empty(), first) {
            (false, _) => Ok(tokens),
            (true, Some(first)) if !tokenizer.is_bytes() => Ok(vec![first]),
            (true, _) => tokenizer.encode("\n"),
        }
    }
}
