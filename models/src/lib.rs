#![doc = "Transformer models built from the parallel layers of `burn-megatron`."]
//!
//! One decoder, [`Transformer`], which can be configured as a GPT-2
//! ([`TransformerConfig::gpt2`]), a Llama ([`TransformerConfig::llama`]), a Mixtral
//! ([`TransformerConfig::mixtral`]) or a DeepSeek-V3 ([`TransformerConfig::deepseek`]), conversion from and to Hugging
//! Face models ([`hf`]), and from a dense model to one with experts ([`upcycle`]).

mod block;
mod config;
mod difference;
mod family;
pub mod hf;
mod layers;
mod mla;
mod moe;
mod mtp;
mod positions;
mod scaling;
mod transformer;
pub mod upcycle;
mod weights;

pub use block::Block;
pub use config::TransformerConfig;
pub use mla::MlaConfig;
pub use moe::MoeConfig;
pub use mtp::MtpConfig;
pub use positions::Positions;
pub use scaling::RotaryScaling;
pub use transformer::Transformer;

/// Compiles the examples of the README.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
