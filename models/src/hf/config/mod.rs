//! `config.json`: what a model of Hugging Face computes.

mod keys;
mod read;
mod rope;
#[cfg(test)]
mod tests;
mod write;

use burn_megatron::checkpoint::ElementType;
use serde::{Deserialize, Serialize};

use crate::TransformerConfig;
use keys::Keys;

use super::HfConfigError;

/// A family of models, by its `model_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Family {
    /// GPT-2: LayerNorm, learned positions, biases, one product for queries, keys and values.
    Gpt2,
    /// Llama 1 to 3: RMSNorm, rotary positions, a gated MLP.
    Llama,
    /// Mistral: Llama with a sliding window.
    Mistral,
    /// Qwen 2 and 2.5: Llama with biases of queries, keys and values.
    Qwen2,
    /// Qwen 3: Llama with norms of each head's queries and keys.
    Qwen3,
}

impl Family {
    /// Every family.
    pub const ALL: [Self; 5] = [
        Self::Gpt2,
        Self::Llama,
        Self::Mistral,
        Self::Qwen2,
        Self::Qwen3,
    ];

    /// Its `model_type`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gpt2 => "gpt2",
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
        }
    }

    /// The class of `transformers` that predicts tokens.
    pub fn architecture(self) -> &'static str {
        match self {
            Self::Gpt2 => "GPT2LMHeadModel",
            Self::Llama => "LlamaForCausalLM",
            Self::Mistral => "MistralForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
        }
    }
}

/// The tokens that a configuration names.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SpecialTokens {
    /// Begins a text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bos: Option<u32>,
    /// Any of these ends one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub eos: Vec<u32>,
    /// Fills up.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pad: Option<u32>,
}

/// What a `config.json` says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HfConfig {
    /// The family.
    pub family: Family,
    /// The model.
    pub model: TransformerConfig,
    /// The type that the weights are said to have (`torch_dtype` or `dtype`); the files are what counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dtype: Option<ElementType>,
    /// The tokens that it names.
    #[serde(default)]
    pub tokens: SpecialTokens,
}

impl HfConfig {
    /// Reads a `config.json`, in the spelling of `transformers` 4 or 5.
    ///
    /// Every key is known, or an error: one that was passed over might change what the model computes.
    /// Dropout is taken over: that of GPT-2 as [`dropout`](TransformerConfig::dropout) and
    /// [`attention_dropout`](TransformerConfig::attention_dropout), of the others the latter.
    ///
    /// # Errors
    ///
    /// [`HfConfigError`], which names the key, its value and what would fit.
    pub fn parse(bytes: &[u8]) -> Result<Self, HfConfigError> {
        let map = serde_json::from_slice(bytes).map_err(HfConfigError::Json)?;
        let (mut keys, family) = Keys::new(map)?;
        let model = match family {
            Family::Gpt2 => read::gpt2(&mut keys)?,
            _ => read::llama_like(family, &mut keys)?,
        };
        let config = Self {
            family,
            model,
            dtype: read::dtype(&mut keys)?,
            tokens: read::tokens(&mut keys)?,
        };
        keys.finish()?;
        config.check()?;
        Ok(config)
    }

    /// The configuration of a model, in the first family that computes the same.
    ///
    /// What only training knows is not in it: label smoothing, z-loss, and the dropout of the residual
    /// stream outside of GPT-2.
    ///
    /// # Errors
    ///
    /// [`HfConfigError::NoFamily`], which says what stands in the way.
    pub fn of(model: &TransformerConfig) -> Result<Self, HfConfigError> {
        let config = Self {
            family: write::family(model),
            model: model.clone(),
            dtype: None,
            tokens: SpecialTokens::default(),
        };
        config.check()?;
        Ok(config)
    }

    /// Checks that the sizes of the model fit each other, and that the family computes it.
    ///
    /// # Errors
    ///
    /// [`HfConfigError::Sizes`], [`HfConfigError::NoFamily`].
    pub fn check(&self) -> Result<(), HfConfigError> {
        match self.model.check(1, false) {
            Ok(_) => write::check(self.family, &self.model),
            Err(error) => Err(HfConfigError::Sizes(error.to_string())),
        }
    }

    /// The text of its `config.json`, which `transformers` 4 and 5 read.
    ///
    /// # Errors
    ///
    /// See [`check`](Self::check).
    pub fn to_json(&self) -> Result<String, HfConfigError> {
        self.check()?;
        let value = serde_json::Value::Object(write::object(self));
        Ok(format!("{value:#}\n"))
    }
}
