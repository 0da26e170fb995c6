#![doc = "Common code of the tests that need several crates; see `tests/`."]

pub mod corrupted;
pub mod faulty;
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
use burn_megatron::choice::KernelChoices;
use burn_megatron::nn::fp8::Fp8Config;
use burn_megatron::nn::{Activation, NormKind};
use burn_megatron_models::{Positions, TransformerConfig, TransformerSubject};

/// A small GPT with dropout and a vocabulary that must be padded.
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
        sequence_length: None,
        dtype: DType::F64,
    }
}

/// The same without dropout, so that each norm adds the branch before it, and attention is fused.
pub fn without_dropout(subject: TransformerSubject) -> TransformerSubject {
    let config = TransformerConfig {
        dropout: 0.0,
        attention_dropout: 0.0,
        ..subject.config
    };
    TransformerSubject { config, ..subject }
}

/// A small Llama with two groups of keys and values, without attention dropout, so that its attention is
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
