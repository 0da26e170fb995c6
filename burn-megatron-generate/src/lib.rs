//! Text generation with a language model in any layout.
//!
//! A [`Generator`] runs each rank's part of the model on the texts so far and samples the next token of each. With a cache
//! of [keys and values](burn_megatron::nn::KvCache) each token is read once, until a text is longer than the model's
//! context: then the last `context` tokens are read again for each new one.
//!
//! New tokens of all texts are one row `[1, tokens]`: what computes token by token computes them together, with the same
//! bits for a token whatever others there are; attention goes text by text. So a text is the same in any batch.
//!
//! [`GenerateConfig`] sets how tokens are sampled. Samples are a function of the seed, computed from the logits
//! in f64, so every layout generates the same text as far as its logits are equal.

mod config;
mod error;
mod generator;
mod reader;
mod sampling;
mod stop;
#[cfg(test)]
mod tests;
mod writing;

pub use config::{GenerateConfig, GenerateConfigError};
pub use error::GenerateError;
pub use generator::{FinishReason, GenerationOutput, Generator, Written};
