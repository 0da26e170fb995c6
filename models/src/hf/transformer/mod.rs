//! The Hugging Face families of [`TransformerConfig`].

mod deepseek;
mod expert_tensors;
mod experts;
mod gemma;
mod gpt_oss;
mod mtp;
mod read;
mod rope;
mod tensors;
mod windows;
mod write;

use std::collections::BTreeMap;

use burn_megatron::nn::QkNorm;
use burn_megatron::nn::moe::ScoreFunction;
use serde_json::{Map, Value};

use super::{ClassDefaults, ConfigKeys, HfConfigError, HfFamily, HfNames, WeightMapping};
use crate::{MlaConfig, MoeConfig, TransformerConfig};

/// The defaults of the classes of `transformers` 5.24, by `model_type`. Written by `index.py` next to the fixtures.
const CLASS_DEFAULTS: &str = include_str!("../config/defaults.json");

/// The families that a [`TransformerConfig`] describes.
///
/// Of training settings `config.json` has the dropout: of GPT-2 as [`dropout`](TransformerConfig::dropout) and
/// [`attention_dropout`](TransformerConfig::attention_dropout), of other families only the latter. Label smoothing and
/// z-loss are left out, and so are the losses of routers, whose definition differs.
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
    /// DeepSeek-V2: latent attention, experts beside shared ones, by the best groups of experts or without groups.
    DeepseekV2,
    /// DeepSeek-V3: DeepSeek-V2 with experts chosen by sigmoids and biases.
    DeepseekV3,
    /// gpt-oss: sinks, windows in every second block, experts with biases.
    GptOss,
}

impl ModelFamily {
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
                qk_norm: Some(QkNorm::Heads),
                ..TransformerConfig::llama()
            },
            Self::Mixtral => TransformerConfig::mixtral(),
            Self::Qwen3Moe => TransformerConfig {
                qk_norm: Some(QkNorm::Heads),
                ..TransformerConfig::mixtral()
            },
            Self::Gemma2 => gemma::defaults(false),
            Self::Gemma3Text => gemma::defaults(true),
            Self::DeepseekV2 => TransformerConfig {
                // As in DeepSeek-V2-Lite. A recipe could not remove a rank that the family has.
                mla: TransformerConfig::deepseek().mla.map(|mla| MlaConfig {
                    q_rank: None,
                    ..mla
                }),
                moe: Some(MoeConfig {
                    score: ScoreFunction::PreSoftmax,
                    factor: 1.0,
                    groups: None,
                    bias_update_rate: None,
                    ..MoeConfig::deepseek()
                }),
                ..TransformerConfig::deepseek()
            },
            Self::DeepseekV3 => TransformerConfig::deepseek(),
            Self::GptOss => gpt_oss::defaults(),
            Self::Olmoe => TransformerConfig {
                qk_norm: Some(QkNorm::Whole),
                moe: Some(MoeConfig {
                    score: ScoreFunction::PreSoftmax,
                    ..MoeConfig::default()
                }),
                ..TransformerConfig::mixtral()
            },
        }
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
        let (model_type, architecture) = match self {
            Self::Gpt2 => ("gpt2", "GPT2LMHeadModel"),
            Self::Llama => ("llama", "LlamaForCausalLM"),
            Self::Mistral => ("mistral", "MistralForCausalLM"),
            Self::Qwen2 => ("qwen2", "Qwen2ForCausalLM"),
            Self::Qwen3 => ("qwen3", "Qwen3ForCausalLM"),
            Self::Mixtral => ("mixtral", "MixtralForCausalLM"),
            Self::Qwen3Moe => ("qwen3_moe", "Qwen3MoeForCausalLM"),
            Self::Olmoe => ("olmoe", "OlmoeForCausalLM"),
            Self::Gemma2 => ("gemma2", "Gemma2ForCausalLM"),
            Self::Gemma3Text => ("gemma3_text", "Gemma3ForCausalLM"),
            Self::DeepseekV2 => ("deepseek_v2", "DeepseekV2ForCausalLM"),
            Self::DeepseekV3 => ("deepseek_v3", "DeepseekV3ForCausalLM"),
            Self::GptOss => ("gpt_oss", "GptOssForCausalLM"),
        };
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
        write::family(model)
    }

    fn check(self, model: &TransformerConfig) -> Result<(), HfConfigError> {
        write::check(self, model)
    }

    fn read(self, keys: &mut ConfigKeys) -> Result<TransformerConfig, HfConfigError> {
        match self {
            Self::Gpt2 => read::gpt2(keys),
            Self::Gemma2 | Self::Gemma3Text => gemma::read(self, keys),
            Self::DeepseekV2 | Self::DeepseekV3 => deepseek::read(self, keys),
            Self::GptOss => gpt_oss::read(keys),
            _ => read::llama_like(self, keys),
        }
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
        write::keys(self, model)
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
