#![doc = "Transformer models built from the parallel layers of `burn-megatron`."]
//!
//! One decoder, [`Transformer`], which can be configured as a GPT-2
//! ([`TransformerConfig::gpt2`]) or a Llama ([`TransformerConfig::llama`]), and conversion from and to
//! Hugging Face models ([`hf`]).

mod block;
mod config;
mod difference;
pub mod hf;
mod open;
mod rounding;
mod scaling;
mod subject;
mod transformer;

pub use block::Block;
pub use config::{Positions, TransformerConfig};
pub use difference::ConfigDifference;
pub use open::ModelSource;
pub use scaling::RotaryScaling;
pub use subject::TransformerSubject;
pub use transformer::Transformer;

/// Compiles the examples of the README.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
