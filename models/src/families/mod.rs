//! The Hugging Face model families that a [`TransformerConfig`] can describe. Each family has a file. Families that
//! differ by a few settings share a file. The other files contain code for several families.

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

/// The default values of the configuration classes in `transformers` 5.24, by `model_type`. `index.py` next to the
/// fixtures writes this file.
const CLASS_DEFAULTS: &str = include_str!("../hf/config/defaults.json");

/// The Hugging Face model families that a [`TransformerConfig`] can describe.
///
/// Dropout is the only training setting that is read from and written to `config.json`. For GPT-2, it includes
/// [`dropout`](TransformerConfig::dropout) and [`attention_dropout`](TransformerConfig::attention_dropout). For other
/// families, it includes only `attention_dropout`. Label smoothing, z-loss and router losses are not converted.
/// `transformers` defines the router losses differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelFamily {
    /// GPT-2, with LayerNorm, learned positions, biases and a joint query-key-value projection.
    Gpt2,
    /// Llama 1 to 3, with RMSNorm, rotary positions and a gated MLP.
    Llama,
    /// Mistral, which is a Llama with a sliding attention window.
    Mistral,
    /// Qwen 2 and 2.5, which are a Llama with biases in the query, key and value projections.
    Qwen2,
    /// Qwen 3, which is a Llama that normalizes the queries and keys of each head.
    Qwen3,
    /// Mixtral, which is a Mistral with experts in every block.
    Mixtral,
    /// Qwen 3 with a mixture of experts.
    Qwen3Moe,
    /// OLMoE, with experts in every block. The queries of all heads are normalized together, and so are the keys of all
    /// heads.
    Olmoe,
    /// Gemma 2, with sliding windows in every second block, soft caps, and norms after attention and after the MLP.
    Gemma2,
    /// The text model of Gemma 3. It normalizes the queries and keys of each head, and blocks with a sliding window
    /// have a different RoPE base.
    Gemma3Text,
    /// DeepSeek-V2, with multi-head latent attention, routed experts and shared experts.
    DeepseekV2,
    /// DeepSeek-V3, which is a DeepSeek-V2 whose router uses sigmoid scores and expert biases.
    DeepseekV3,
    /// gpt-oss, with attention sinks, sliding windows in every second block, and experts with biases.
    GptOss,
}

/// The implementation of a family.
trait Family {
    /// Returns the configuration of a small byte-level model of the family.
    fn defaults(&self) -> TransformerConfig;

    /// Reads the model from the keys of a `config.json`.
    fn read(&self, keys: &mut ConfigKeys) -> Result<TransformerConfig, HfConfigError>;

    /// Returns the conditions that a model must meet before [`write`](Self::write) is called. Conditions are not needed
    /// for settings that the keys cannot express, because [`check`] finds them.
    fn conditions(&self, _model: &TransformerConfig) -> Conditions {
        vec![]
    }

    /// Returns the keys of a model, without the keys that all families have.
    fn write(&self, model: &TransformerConfig) -> Map<String, Value>;
}

/// The conditions of a family: a description of each condition, and whether a model meets it.
type Conditions = Vec<(&'static str, bool)>;

impl ModelFamily {
    /// Returns the `model_type`, the name of the class in `transformers`, and the implementation.
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

    /// Returns the configuration of a small byte-level model of the family.
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
