//! The Hugging Face families of [`TransformerConfig`]. Each family has a file, and families that differ by a few
//! settings share a file. The other files have the parts that families share.

mod activation;
mod biases;
mod check;
mod deepseek;
mod expert_tensors;
mod experts;
mod gemma;
mod gpt2;
mod gpt_oss;
mod mtp;
mod plain;
mod rope;
mod sizes;
mod tensors;
mod windows;

use std::collections::BTreeMap;

use burn_megatron::nn::QkNorm;
use burn_megatron::nn::moe::ScoreFunction;
use serde_json::{Map, Value, json};

use crate::hf::{ClassDefaults, ConfigKeys, HfConfigError, HfFamily, HfNames, WeightMapping};
use crate::{MoeConfig, Positions, TransformerConfig};

/// The defaults of the classes of `transformers` 5.24, by `model_type`. Written by `index.py` next to the fixtures.
const CLASS_DEFAULTS: &str = include_str!("../hf/config/defaults.json");

/// The Hugging Face model families that a [`TransformerConfig`] describes.
///
/// The only training setting in `config.json` is dropout. For GPT-2 it sets [`dropout`](TransformerConfig::dropout) and
/// [`attention_dropout`](TransformerConfig::attention_dropout), and for other families only `attention_dropout`. Label
/// smoothing, z-loss and router losses are left out. The definition of router losses differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
    /// Mixtral: Mistral with experts in every block.
    Mixtral,
    /// Qwen 3 with experts.
    Qwen3Moe,
    /// OLMoE: norms of all queries and of all keys, experts in every block.
    Olmoe,
    /// Gemma 2: windows in every second block, soft caps, norms after attention and MLP.
    Gemma2,
    /// Gemma 3 without images: norms of each head's queries and keys, another base in blocks with a window.
    Gemma3Text,
    /// DeepSeek-V2: latent attention, and shared experts in addition to routed experts.
    DeepseekV2,
    /// DeepSeek-V3: DeepSeek-V2 with experts chosen by sigmoids and biases.
    DeepseekV3,
    /// gpt-oss: sinks, windows in every second block, experts with biases.
    GptOss,
}

/// The implementation of a family.
trait Family {
    /// Returns a small byte-level model of the family.
    fn defaults(&self) -> TransformerConfig;

    /// Reads the model from the keys of a `config.json`.
    fn read(&self, keys: &mut ConfigKeys) -> Result<TransformerConfig, HfConfigError>;

    /// Returns conditions that a model must meet before [`write`](Self::write). Settings that the keys cannot express
    /// need no condition: see [`check`].
    fn conditions(&self, _model: &TransformerConfig) -> Conditions {
        vec![]
    }

    /// Returns the keys of a model, without the keys that all families have.
    fn write(&self, model: &TransformerConfig) -> Map<String, Value>;
}

/// Conditions of a family, and whether a model meets them.
type Conditions = Vec<(&'static str, bool)>;

impl ModelFamily {
    /// Returns the `model_type`, the class of `transformers` and the implementation.
    fn entry(self) -> (&'static str, &'static str, &'static dyn Family) {
        use plain::{LLAMA, MISTRAL, MIXTRAL, OLMOE, QWEN2, QWEN3, QWEN3_MOE};
        match self {
            Self::Gpt2 => ("gpt2", "GPT2LMHeadModel", &gpt2::Gpt2),
            Self::Llama => ("llama", "LlamaForCausalLM", &LLAMA),
            Self::Mistral => ("mistral", "MistralForCausalLM", &MISTRAL),
            Self::Qwen2 => ("qwen2", "Qwen2ForCausalLM", &QWEN2),
            Self::Qwen3 => ("qwen3", "Qwen3ForCausalLM", &QWEN3),
            Self::Mixtral => ("mixtral", "MixtralForCausalLM", &MIXTRAL),
            Self::Qwen3Moe => ("qwen3_moe", "Qwen3MoeForCausalLM", &QWEN3_MOE),
            Self::Olmoe => ("olmoe", "OlmoeForCausalLM", &OLMOE),
            Self::Gemma2 => ("gemma2", "Gemma2ForCausalLM", &gemma::GEMMA2),
            Self::Gemma3Text => ("gemma3_text", "Gemma3ForCausalLM", &gemma::GEMMA3),
            Self::DeepseekV2 => ("deepseek_v2", "DeepseekV2ForCausalLM", &deepseek::V2),
            Self::DeepseekV3 => ("deepseek_v3", "DeepseekV3ForCausalLM", &deepseek::V3),
            Self::GptOss => ("gpt_oss", "GptOssForCausalLM", &gpt_oss::GptOss),
        }
    }

    fn family(self) -> &'static dyn Family {
        self.entry().2
    }

    /// Returns a small byte-level model of the family.
    ///
    /// ```
    /// use burn_megatron::nn::QkNorm;
    /// use burn_megatron_models::hf::{HfFamily, ModelFamily};
    ///
    /// let family = ModelFamily::of_name("qwen3").unwrap();
    /// assert_eq!(family.defaults().qk_norm, Some(QkNorm::Heads));
    /// assert!(ModelFamily::of_name("bert").is_none());
    /// ```
    pub fn defaults(self) -> TransformerConfig {
        self.family().defaults()
    }
}

fn map(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

impl HfFamily for ModelFamily {
    type Model = TransformerConfig;

    const ALL: &'static [Self] = &[
        Self::Gpt2,
        Self::Llama,
        Self::Mistral,
        Self::Qwen2,
        Self::Qwen3,
        Self::Mixtral,
        Self::Qwen3Moe,
        Self::Olmoe,
        Self::Gemma2,
        Self::Gemma3Text,
        Self::DeepseekV2,
        Self::DeepseekV3,
        Self::GptOss,
    ];

    fn names(self) -> HfNames {
        let (model_type, architecture, _) = self.entry();
        let (prefix, embedding) = match self {
            Self::Gpt2 => ("transformer.", "transformer.wte.weight"),
            _ => ("model.", "model.embed_tokens.weight"),
        };
        HfNames {
            model_type,
            architecture,
            prefix,
            embedding,
            output: "lm_head.weight",
            buffers: &[".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"],
        }
    }

    fn of_model(model: &TransformerConfig) -> Self {
        let window = windows::size(model);
        let sigmoid = |moe: &MoeConfig| moe.score == ScoreFunction::Sigmoid;
        match (&model.positions, model.qk_norm, window) {
            (Positions::Learned, _, _) => Self::Gpt2,
            _ if model.mla.is_some() && model.moe.as_ref().is_some_and(sigmoid) => Self::DeepseekV3,
            _ if model.mla.is_some() => Self::DeepseekV2,
            _ if model.sinks => Self::GptOss,
            (_, None, _) if model.post_norms => Self::Gemma2,
            (_, Some(QkNorm::Heads), _) if model.post_norms => Self::Gemma3Text,
            (_, Some(QkNorm::Whole), _) => Self::Olmoe,
            (_, Some(QkNorm::Heads), _) if model.moe.is_some() => Self::Qwen3Moe,
            _ if model.moe.is_some() => Self::Mixtral,
            (_, Some(QkNorm::Heads), _) => Self::Qwen3,
            _ if !model.bias && model.has_qkv_bias() && !model.has_output_bias() => Self::Qwen2,
            (_, None, Some(_)) => Self::Mistral,
            (_, None, None) => Self::Llama,
        }
    }

    fn check(self, model: &TransformerConfig) -> Result<(), HfConfigError> {
        check::check(self, model)
    }

    fn read(self, keys: &mut ConfigKeys) -> Result<TransformerConfig, HfConfigError> {
        self.family().read(keys)
    }

    fn class_defaults(self) -> ClassDefaults {
        let all: Result<BTreeMap<String, ClassDefaults>, _> = serde_json::from_str(CLASS_DEFAULTS);
        let own = all.ok().and_then(|mut all| all.remove(self.name()));
        own.unwrap_or_default()
    }

    fn without_missing(
        self,
        model: &TransformerConfig,
        has: &dyn Fn(&str) -> bool,
    ) -> Option<(TransformerConfig, &'static str)> {
        mtp::without_missing(model, has)
    }

    fn copies(self, model: &TransformerConfig) -> Vec<(String, &'static str)> {
        mtp::copies(self.names(), model)
    }

    fn write(self, model: &TransformerConfig) -> Map<String, Value> {
        let mut keys = self.family().write(model);
        keys.extend(map(json!({
            "vocab_size": model.vocabulary,
            "tie_word_embeddings": model.tied,
            "initializer_range": model.init_std,
        })));
        keys
    }

    fn tensors(self, model: &TransformerConfig) -> Vec<WeightMapping> {
        tensors::tensors(self, model, &|_| false)
    }

    fn stored_tensors(
        self,
        model: &TransformerConfig,
        has: &dyn Fn(&str) -> bool,
    ) -> Vec<WeightMapping> {
        tensors::tensors(self, model, has)
    }
}
