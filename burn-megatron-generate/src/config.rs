//! The settings of text generation.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use burn_megatron_data::tokenizer::{Tokenizer, TokenizerError};

/// The maximum number of samples per prompt.
const MAX_SAMPLES: usize = 1 << 16;

/// The settings of text generation: the prompt, the length of the text, and the sampling method.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct GenerateConfig {
    /// The prompt, which the generated text continues.
    pub prompt: String,
    /// The maximum number of new tokens. With 0, no token is generated.
    pub tokens: usize,
    /// The sampling temperature. The logits are divided by this number. With 0, the most likely token is selected
    /// (greedy decoding).
    pub temperature: f64,
    /// Top-k sampling: only the `top_k` most likely tokens can be sampled. `None` allows all tokens.
    pub top_k: Option<usize>,
    /// Nucleus (top-p) sampling: only the smallest set of most likely tokens whose probabilities sum to at least
    /// `top_p` can be sampled. It is applied after `top_k`. `None` disables nucleus sampling.
    pub top_p: Option<f64>,
    /// Stop strings. The text ends before the first occurrence of one of these strings, even if the string spans
    /// several tokens.
    pub stop: Vec<String>,
    /// The random seed. The default is the seed of the run, or 0 if the run has no seed. All prompts of a batch use the
    /// same seed.
    pub seed: Option<u64>,
    /// The number of generated texts per prompt (`num_return_sequences` in `transformers`). Sample `i` uses random
    /// stream `i` of the seed, so it does not depend on the number of samples. This option cannot be set in a recipe.
    #[serde(skip)]
    pub samples: usize,
    /// Whether the log-probabilities of the new tokens are returned. This requires a second multiplication with the
    /// weights of the output layer.
    pub logprobs: bool,
    /// Whether to use speculative decoding, in which the multi-token prediction module drafts one additional token. The
    /// next forward pass reads the next token and the draft. If the sampled token equals the draft, the forward pass
    /// yields two tokens. The generated text is the same as without drafts if the logits of a token do not depend on
    /// the other tokens in the forward pass, as on the CPU.
    pub speculative: bool,
    /// Whether the tokenizer adds its special tokens to the prompt in the same way as to training texts. This option
    /// cannot be set in a recipe.
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

/// The error for an invalid setting of text generation.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum GenerateConfigError {
    /// The temperature is not valid.
    #[error("invalid temperature = {0}: expected at least 0 (0 takes the most likely token)")]
    Temperature(f64),
    /// `top_k` is 0, so no token could be sampled.
    #[error("invalid top_k = 0: expected at least 1")]
    TopK,
    /// `top_p` is not a valid probability.
    #[error("invalid top_p = {0}: expected above 0 and at most 1")]
    TopP(f64),
    /// The number of samples per prompt is 0 or too large.
    #[error("invalid samples = {0}: expected 1 to {MAX_SAMPLES}")]
    Samples(usize),
    /// Several samples are requested with temperature 0, but all samples would be equal.
    #[error(
        "samples = {0} conflicts with temperature = 0, which takes the most likely token: set a temperature above 0"
    )]
    EqualSamples(usize),
    /// A stop string is empty.
    #[error("invalid stop: an empty string would end every text at once; remove it")]
    Stop,
}

impl GenerateConfig {
    /// Checks that the settings are valid.
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

    /// Encodes the prompt as tokens. An empty prompt is replaced by the `bos` token of the tokenizer. If the tokenizer
    /// has no `bos` token, its `eod` token is used, or else a line break.
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
