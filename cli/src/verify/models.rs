//! Small models for `verify`.

use burn_megatron::mesh::ContextExchange;
use burn_megatron::nn::moe::{
    DispatcherKind, ExpertGroups, GroupScore, RouterLoss, RouterLossKind, ScoreFunction,
};
use burn_megatron::nn::{Activation, NormKind, QkNorm};
use burn_megatron_models::{
    MlaConfig, MoeConfig, MtpConfig, Positions, RotaryScaling, TransformerConfig,
};
use burn_megatron_verify::Layout;

/// Small transformers for `verify`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VerifyModel {
    /// GPT-2 with tied output weights, dropout, and a padded vocabulary.
    Gpt,
    /// `Gpt` with untied output weights, label smoothing, z-loss and zero-centered norms.
    GptUntied,
    /// Llama with two KV groups, QKV biases, per-head QK norm, and the RoPE scaling of Llama 3.
    Llama,
    /// Llama with one KV group, tied output weights, a sliding window, z-loss, zero-centered norms, and YaRN scaling.
    LlamaTied,
    /// Llama with experts in every other block.
    Mixtral,
    /// `Mixtral` with tied output weights, sigmoid scores, expert groups, an expert bias, jitter, router losses, and
    /// shared experts.
    MixtralShared,
    /// DeepSeek-V3: multi-head latent attention with YaRN, a dense first block, the router of `MixtralShared`, and
    /// multi-token prediction.
    Deepseek,
    /// Llama with experts that use the flex dispatcher, QK norm over all heads, expert weights that do not sum to 1,
    /// and sliding windows in some blocks.
    Olmoe,
    /// Llama with experts, biases everywhere, attention sinks, a clamped activation, sliding windows in some blocks,
    /// and YaRN scaling.
    GptOss,
    /// Features of Gemma 2 and 3: norms after the branches, soft caps, a scaled embedding, per-head QK norm, and
    /// sliding windows with another RoPE base in some blocks.
    Gemma,
}

impl VerifyModel {
    pub const ALL: [Self; 10] = [
        Self::Gpt,
        Self::GptUntied,
        Self::Llama,
        Self::LlamaTied,
        Self::Mixtral,
        Self::MixtralShared,
        Self::Deepseek,
        Self::Olmoe,
        Self::GptOss,
        Self::Gemma,
    ];

    /// Returns the name in `--models`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gpt => "gpt",
            Self::GptUntied => "gpt-untied",
            Self::Llama => "llama",
            Self::LlamaTied => "llama-tied",
            Self::Mixtral => "mixtral",
            Self::MixtralShared => "mixtral-shared",
            Self::Deepseek => "deepseek",
            Self::Olmoe => "olmoe",
            Self::GptOss => "gpt-oss",
            Self::Gemma => "gemma",
        }
    }

    /// Returns the configuration of a small model with dropout, and a vocabulary that needs padding.
    pub fn config(self) -> TransformerConfig {
        let gpt = TransformerConfig {
            vocabulary: 53,
            context: 16,
            hidden: 32,
            layers: 8,
            heads: 4,
            dropout: 0.1,
            attention_dropout: 0.1,
            ..TransformerConfig::gpt2()
        };
        let llama = TransformerConfig {
            // Fused attention requires that attention dropout is disabled.
            attention_dropout: 0.0,
            groups: Some(2),
            norm: NormKind::Rms,
            activation: Activation::SwiGlu,
            bias: false,
            tied: false,
            ..gpt.clone()
        };
        let rotary = |scaling| Positions::Rotary {
            base: 10_000.0,
            scaling,
        };
        let experts = MoeConfig {
            experts: 4,
            expert_width: Some(16),
            every: 2,
            ..MoeConfig::default()
        };
        let loss = |kind, coefficient| RouterLoss { kind, coefficient };
        match self {
            Self::Gpt => gpt,
            Self::GptUntied => TransformerConfig {
                tied: false,
                label_smoothing: 0.1,
                z_loss: 1e-2,
                norm_zero_centered: true,
                ..gpt
            },
            Self::Llama => TransformerConfig {
                qkv_bias: Some(true),
                qk_norm: Some(QkNorm::Heads),
                positions: rotary(RotaryScaling::Llama3 {
                    factor: 4.0,
                    low: 1.0,
                    high: 2.0,
                    original: 8,
                }),
                ..llama
            },
            Self::LlamaTied => TransformerConfig {
                tied: true,
                groups: Some(1),
                window: Some(5),
                z_loss: 1e-2,
                norm_zero_centered: true,
                positions: rotary(RotaryScaling::Yarn {
                    factor: 2.0,
                    original: 8,
                    beta_fast: 4.0,
                    beta_slow: 1.0,
                    mscale: 1.0,
                    mscale_all_dim: 0.0,
                    truncate: true,
                    attention_factor: None,
                }),
                ..llama
            },
            Self::Mixtral => TransformerConfig {
                moe: Some(experts),
                ..llama
            },
            Self::MixtralShared => TransformerConfig {
                tied: true,
                moe: Some(MoeConfig {
                    score: ScoreFunction::Sigmoid,
                    factor: 2.5,
                    groups: Some(ExpertGroups {
                        groups: 2,
                        chosen: 1,
                        score: GroupScore::SumOf(2),
                    }),
                    bias_update_rate: Some(0.05),
                    jitter: 0.1,
                    losses: vec![
                        loss(RouterLossKind::SequenceBalance, 0.05),
                        loss(RouterLossKind::ZLoss, 0.01),
                    ],
                    shared_width: Some(12),
                    shared_gate: true,
                    ..experts
                }),
                ..llama
            },
            Self::Deepseek => TransformerConfig {
                groups: None,
                scaled_output_init: false,
                positions: rotary(RotaryScaling::Yarn {
                    factor: 2.0,
                    original: 8,
                    beta_fast: 4.0,
                    beta_slow: 1.0,
                    mscale: 1.0,
                    mscale_all_dim: 1.0,
                    truncate: true,
                    attention_factor: None,
                }),
                mla: Some(MlaConfig {
                    q_rank: Some(12),
                    kv_rank: 8,
                    nope_width: 4,
                    rope_width: 4,
                    value_width: 6,
                    norm_epsilon: 1e-6,
                }),
                moe: Some(MoeConfig {
                    every: 1,
                    first_dense: 1,
                    score: ScoreFunction::Sigmoid,
                    factor: 2.5,
                    groups: Some(ExpertGroups {
                        groups: 2,
                        chosen: 1,
                        score: GroupScore::SumOf(2),
                    }),
                    bias_update_rate: Some(0.05),
                    losses: vec![loss(RouterLossKind::SequenceBalance, 0.05)],
                    shared_width: Some(12),
                    dispatcher: DispatcherKind::Flex,
                    ..experts
                }),
                mtp: Some(MtpConfig::default()),
                ..llama
            },
            Self::Olmoe => TransformerConfig {
                // Use widths that are not powers of two: 1 / 24 is inexact.
                head_width: Some(6),
                qk_norm: Some(QkNorm::Whole),
                layer_windows: [[5, 0]; 4].concat(),
                positions: Positions::rotary(10_000.0),
                moe: Some(MoeConfig {
                    score: ScoreFunction::PreSoftmax,
                    dispatcher: DispatcherKind::Flex,
                    ..experts
                }),
                ..llama
            },
            Self::GptOss => TransformerConfig {
                layer_windows: [[5, 0]; 4].concat(),
                bias: true,
                sinks: true,
                activation: Activation::ClampedSwiGlu,
                positions: rotary(RotaryScaling::Yarn {
                    factor: 4.0,
                    original: 8,
                    beta_fast: 8.0,
                    beta_slow: 1.0,
                    mscale: 1.0,
                    mscale_all_dim: 0.0,
                    truncate: false,
                    attention_factor: None,
                }),
                moe: Some(MoeConfig {
                    router_bias: true,
                    ..experts
                }),
                ..llama
            },
            Self::Gemma => TransformerConfig {
                norm_zero_centered: true,
                activation: Activation::GeGlu,
                qk_norm: Some(QkNorm::Heads),
                qk_norm_zero_centered: true,
                layer_windows: [[5, 0]; 4].concat(),
                positions: rotary(RotaryScaling::Linear { factor: 4.0 }),
                local_base: Some(100.0),
                attention_scale: Some(0.5),
                attention_soft_cap: Some(2.0),
                logit_soft_cap: Some(2.0),
                post_norms: true,
                scaled_embedding: true,
                tied: true,
                ..llama
            },
        }
    }

    /// Returns the layouts in which the model is verified by default.
    pub fn layouts(self) -> Vec<Layout> {
        match self {
            Self::Mixtral | Self::MixtralShared | Self::Olmoe => Layout::experts(),
            Self::Deepseek => {
                let exchanges = [None, Some(ContextExchange::AllGather)];
                let contexts = Layout::contexts().into_iter();
                let gathering =
                    contexts.filter(|layout| exchanges.contains(&layout.parallel.context_exchange));
                Layout::experts().into_iter().chain(gathering).collect()
            }
            Self::GptOss => Layout::contexts(),
            Self::Gemma => Layout::standard(),
            Self::Llama => [usual(), Layout::contexts()].concat(),
            _ => usual(),
        }
    }
}

/// Returns the default layouts for any model.
pub fn usual() -> Vec<Layout> {
    [Layout::standard(), Layout::pipelines(), Layout::sharded()].concat()
}
