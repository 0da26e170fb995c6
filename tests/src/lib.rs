#![doc = "Common code of the tests that need several crates; see `tests/`."]

pub mod fuzz;
#[cfg(any(feature = "cuda", feature = "wgpu"))]
mod gpu;
pub mod heap;
pub mod inputs;
pub mod overflows;
pub mod pairwise;
pub mod recomputing;
pub mod step;
pub mod tampered;
mod text;
pub mod tolerance;
mod words;

#[cfg(any(feature = "cuda", feature = "wgpu"))]
pub use gpu::gpu;
pub use text::Text;
pub use words::words;

use burn::tensor::DType;
use burn_megatron::kernel_selection::KernelChoices;
use burn_megatron::nn::fp8::Fp8Config;
use burn_megatron::nn::moe::ScoreFunction;
use burn_megatron::nn::{Activation, NormKind, QkNorm};
use burn_megatron_models::{MoeConfig, Positions, RotaryScaling, TransformerConfig};

/// A transformer to verify.
pub type TransformerSubject = burn_megatron_verify::ModelSubject<TransformerConfig>;

/// Returns a small GPT with dropout and a vocabulary that must be padded.
pub fn small_gpt() -> TransformerSubject {
    let config = TransformerConfig {
        vocabulary: 21,
        context: 8,
        hidden: 16,
        layers: 2,
        heads: 4,
        dropout: 0.1,
        attention_dropout: 0.1,
        ..TransformerConfig::gpt2()
    };
    TransformerSubject {
        config,
        seed: 1,
        samples: 4,
        kernels: KernelChoices::default(),
        packed: false,
        fp8: Fp8Config::default(),
        lora: None,
        sequence_length: None,
        dtype: DType::F64,
    }
}

/// Returns the subject without dropout, so that each norm adds the branch before it, and attention is fused.
pub fn without_dropout(subject: TransformerSubject) -> TransformerSubject {
    let config = TransformerConfig {
        dropout: 0.0,
        attention_dropout: 0.0,
        ..subject.config
    };
    TransformerSubject { config, ..subject }
}

/// Returns LongRoPE for heads with `width` rotated features. Sequences of up to `original` tokens use different
/// angles than longer sequences.
pub fn long_rope(width: usize, original: usize) -> Positions {
    let factors = |step: f64| (0..width / 2).map(move |pair| 1.0 + step * (pair + 1) as f64);
    Positions::Rotary {
        base: 100.0,
        scaling: RotaryScaling::LongRope {
            short_factor: factors(0.1).collect(),
            long_factor: factors(1.0).collect(),
            original,
            attention_factor: 1.1,
        },
    }
}

/// Returns a small OLMoE: norms over all queries and over all keys, experts, and windows in some blocks.
pub fn small_olmoe() -> TransformerSubject {
    let llama = small_llama();
    let config = TransformerConfig {
        qk_norm: Some(QkNorm::Whole),
        layer_windows: vec![3, 0],
        moe: Some(MoeConfig {
            experts: 4,
            expert_width: Some(8),
            score: ScoreFunction::PreSoftmax,
            ..MoeConfig::default()
        }),
        init_std: 0.2,
        ..llama.config
    };
    TransformerSubject { config, ..llama }
}

/// Returns a small gpt-oss: biases everywhere, sinks, a clamped activation, experts, and windows in some blocks.
pub fn small_gpt_oss() -> TransformerSubject {
    let olmoe = small_olmoe();
    let config = TransformerConfig {
        qk_norm: None,
        bias: true,
        sinks: true,
        activation: Activation::ClampedSwiGlu,
        positions: Positions::Rotary {
            base: 1000.0,
            scaling: RotaryScaling::Yarn {
                factor: 4.0,
                original: 4,
                beta_fast: 8.0,
                beta_slow: 1.0,
                mscale: 1.0,
                mscale_all_dim: 0.0,
                truncate: false,
                attention_factor: None,
            },
        },
        moe: olmoe.config.moe.map(|moe| MoeConfig {
            score: ScoreFunction::Softmax,
            router_bias: true,
            ..moe
        }),
        ..olmoe.config
    };
    TransformerSubject { config, ..olmoe }
}

/// Returns a small Gemma with all features of Gemma 2 and 3, and tied weights.
pub fn small_gemma() -> TransformerSubject {
    let llama = small_llama();
    let config = TransformerConfig {
        norm_zero_centered: true,
        activation: Activation::GeGlu,
        layer_windows: vec![3, 0],
        local_base: Some(100.0),
        qk_norm: Some(QkNorm::Heads),
        qk_norm_zero_centered: true,
        attention_scale: Some(0.7),
        attention_soft_cap: Some(0.5),
        logit_soft_cap: Some(0.5),
        post_norms: true,
        scaled_embedding: true,
        tied: true,
        init_std: 0.2,
        ..llama.config
    };
    TransformerSubject { config, ..llama }
}

/// Returns a small Llama with two groups of keys and values, without attention dropout, so that its attention is
/// fused.
pub fn small_llama() -> TransformerSubject {
    let gpt = small_gpt();
    let config = TransformerConfig {
        attention_dropout: 0.0,
        groups: Some(2),
        norm: NormKind::Rms,
        activation: Activation::SwiGlu,
        positions: Positions::rotary(10_000.0),
        bias: false,
        tied: false,
        mlp_width: Some(24),
        ..gpt.config
    };
    TransformerSubject { config, ..gpt }
}
