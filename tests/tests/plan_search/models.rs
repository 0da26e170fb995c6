//! Published models.

use burn_megatron::nn::QkNorm;
use burn_megatron_models::{MlaConfig, MoeConfig, TransformerConfig};

fn dense(hidden: usize, layers: usize, heads: usize, mlp_width: usize) -> TransformerConfig {
    TransformerConfig {
        hidden,
        layers,
        heads,
        groups: Some(8),
        head_width: Some(128),
        mlp_width: Some(mlp_width),
        vocabulary: 128_256,
        ..TransformerConfig::llama()
    }
}

pub fn llama_8b() -> TransformerConfig {
    dense(4096, 32, 32, 14336)
}

pub fn llama_70b() -> TransformerConfig {
    dense(8192, 80, 64, 28672)
}

pub fn llama_405b() -> TransformerConfig {
    dense(16384, 126, 128, 53248)
}

/// Returns a Qwen3-MoE model with 128 experts and 8 experts per token.
fn qwen(hidden: usize, layers: usize, heads: usize, width: usize) -> TransformerConfig {
    TransformerConfig {
        groups: Some(4),
        qk_norm: Some(QkNorm::Heads),
        vocabulary: 151_936,
        moe: Some(MoeConfig {
            experts: 128,
            experts_per_token: 8,
            expert_width: Some(width),
            ..MoeConfig::default()
        }),
        ..dense(hidden, layers, heads, 1)
    }
}

pub fn qwen_30b() -> TransformerConfig {
    qwen(2048, 48, 32, 768)
}

pub fn qwen_235b() -> TransformerConfig {
    qwen(4096, 94, 64, 1536)
}

/// Returns DeepSeek-V3 without multi-token prediction.
pub fn deepseek_v3() -> TransformerConfig {
    TransformerConfig {
        groups: None,
        head_width: None,
        vocabulary: 129_280,
        mla: Some(MlaConfig {
            q_rank: Some(1536),
            kv_rank: 512,
            nope_width: 128,
            rope_width: 64,
            value_width: 128,
            norm_epsilon: 1e-6,
        }),
        moe: Some(MoeConfig {
            experts: 256,
            experts_per_token: 8,
            expert_width: Some(2048),
            shared_width: Some(2048),
            first_dense: 3,
            ..MoeConfig::default()
        }),
        ..dense(7168, 61, 128, 18432)
    }
}

/// Returns a GPT without experts: layer norms, biases, tied output.
pub fn gpt(
    hidden: usize,
    layers: usize,
    heads: usize,
    vocabulary: usize,
    positions: usize,
) -> TransformerConfig {
    TransformerConfig {
        hidden,
        layers,
        heads,
        vocabulary,
        context: positions,
        ..TransformerConfig::gpt2()
    }
}
