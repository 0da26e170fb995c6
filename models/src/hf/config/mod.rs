//! `config.json`: the configuration of a Hugging Face model.

mod keys;
mod read;
mod rope;
#[cfg(test)]
mod tests;
mod write;

use burn_megatron::checkpoint::ElementType;
use serde::{Deserialize, Serialize};

use crate::TransformerConfig;
use keys::ConfigKeys;

use super::HfConfigError;

/// A model family, identified by its `model_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelFamily {
    /// GPT-2: LayerNorm, learned positions, biases, joint query-key-value projection.
    Gpt2,
    /// Llama 1 to 3: RMSNorm, rotary positions, a gated MLP.
    Llama,
    /// Mistral: Llama with a sliding window.
    Mistral,
    /// Qwen 2 and 2.5: Llama with query-key-value biases.
    Qwen2,
    /// Qwen 3: Llama with norms of each head's queries and keys.
    Qwen3,
}

impl ModelFamily {
    /// All families.
    pub const ALL: [Self; 5] = [
        Self::Gpt2,
        Self::Llama,
        Self::Mistral,
        Self::Qwen2,
        Self::Qwen3,
    ];

    /// A small model of the family, of bytes.
    pub fn defaults(self) -> TransformerConfig {
        match self {
            Self::Gpt2 => TransformerConfig::gpt2(),
            Self::Llama => TransformerConfig::llama(),
            Self::Mistral => TransformerConfig {
                window: Some(64),
                ..TransformerConfig::llama()
            },
            Self::Qwen2 => TransformerConfig {
                qkv_bias: Some(true),
                ..TransformerConfig::llama()
            },
            Self::Qwen3 => TransformerConfig {
                qk_norm: true,
                ..TransformerConfig::llama()
            },
        }
    }

    /// The family of a `model_type`.
    pub fn of_name(name: &str) -> Option<Self> {
        let mut families = Self::ALL.into_iter();
        families.find(|family| family.name() == name)
    }

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

    /// The class of `transformers` for causal language modeling.
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

/// The special tokens of a configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SpecialTokenIds {
    /// Begin of a sequence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bos: Option<u32>,
    /// End of a sequence: any of these.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub eos: Vec<u32>,
    /// Padding.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pad: Option<u32>,
}

/// The content of a `config.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HfConfig {
    /// The family.
    pub family: ModelFamily,
    /// The model.
    pub model: TransformerConfig,
    /// The declared type of the weights (`torch_dtype` or `dtype`); the files' own types are used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dtype: Option<ElementType>,
    /// The special tokens.
    #[serde(default)]
    pub tokens: SpecialTokenIds,
}

impl HfConfig {
    /// Parses a `config.json`, in the format of `transformers` 4 or 5.
    ///
    /// An unknown key is an error, as it could change what the model computes. Dropout is kept: of GPT-2 as
    /// [`dropout`](TransformerConfig::dropout) and
    /// [`attention_dropout`](TransformerConfig::attention_dropout), of other families only the latter.
    ///
    /// # Errors
    ///
    /// [`HfConfigError`], which names the key, its value and what is supported.
    pub fn parse(bytes: &[u8]) -> Result<Self, HfConfigError> {
        let map = serde_json::from_slice(bytes).map_err(HfConfigError::Json)?;
        let (mut keys, family) = ConfigKeys::new(map)?;
        let model = match family {
            ModelFamily::Gpt2 => read::gpt2(&mut keys)?,
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

    /// The configuration of a model, in the first family that computes it.
    ///
    /// Settings of training only are left out: label smoothing, z-loss, and the dropout of the residual stream
    /// outside of GPT-2.
    ///
    /// # Errors
    ///
    /// [`HfConfigError::NoFamily`], which names the first setting that does not fit.
    pub fn of(model: &TransformerConfig) -> Result<Self, HfConfigError> {
        let config = Self {
            family: write::family(model),
            model: model.clone(),
            dtype: None,
            tokens: SpecialTokenIds::default(),
        };
        config.check()?;
        Ok(config)
    }

    /// Checks that the sizes of the model are consistent, and that the family computes it.
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

    /// The content of its `config.json`, for `transformers` 4 and 5.
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
