#![doc = "Transformer models built from the parallel layers of `burn-megatron`."]
//!
//! [`Transformer`] is a decoder-only transformer. A [`TransformerConfig`] describes a GPT-2
//! ([`TransformerConfig::gpt2`]), a Llama ([`TransformerConfig::llama`]), a Mixtral ([`TransformerConfig::mixtral`]) or
//! a DeepSeek-V3 ([`TransformerConfig::deepseek`]). The module [`hf`] reads and writes Hugging Face models, and
//! [`upcycle`] converts a dense model to a mixture of experts.
//!
//! A layer is built from a [`LayerSpec`], which contains the specifications of its mixer (such as attention) and of its
//! feed-forward part. To add custom mixers, implement [`Mixer`].

mod block;
mod config;
mod cost;
mod difference;
mod families;
mod family;
mod feed_forward;
pub mod hf;
mod layer_spec;
mod mixer;
mod mtp;
mod part;
mod transformer;
pub mod upcycle;
mod weights;

pub use block::Block;
pub use burn_megatron::kernels::rope::Scaling as RotaryScaling;
pub use config::{MlaConfig, MoeConfig, MtpConfig, Positions, TransformerConfig};
pub use feed_forward::FeedForward;
pub use layer_spec::{FeedForwardSpec, LayerSpec, MixerSpec};
pub use mixer::{LayerFlops, Mixer, MixerInput, StandardMixer};
pub use part::PartOutput;
pub use transformer::Transformer;

/// Compiles the examples of the README.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
