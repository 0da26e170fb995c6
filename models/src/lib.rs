#![doc = "Transformer models built from the parallel layers of `burn-megatron`."]
//!
//! One decoder, [`Transformer`], which its [`TransformerConfig`] makes a GPT-2
//! ([`TransformerConfig::gpt2`]) or a Llama ([`TransformerConfig::llama`]), and its exchange with
//! Hugging Face ([`hf`]).

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
pub use difference::Difference;
pub use open::OpenModel;
pub use scaling::RotaryScaling;
pub use subject::TransformerSubject;
pub use transformer::Transformer;
