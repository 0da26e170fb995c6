#![doc = "Transformer models built from the parallel layers of `burn-megatron`."]
//!
//! One decoder, [`Transformer`], which its [`TransformerConfig`] makes a GPT-2
//! ([`TransformerConfig::gpt2`]) or a Llama ([`TransformerConfig::llama`]).

mod block;
mod config;
mod scaling;
mod subject;
mod transformer;

pub use block::Block;
pub use config::{Positions, TransformerConfig};
pub use scaling::RotaryScaling;
pub use subject::TransformerSubject;
pub use transformer::Transformer;
