//! Text generation with a language model in any layout.
//!
//! A [`Generator`] runs each rank's part of the model on the current texts, and samples the next token of each text.
//! With a [KV cache](burn_megatron::nn::KvCache), each token is read once, until a text is longer than the model's
//! context. From then on, the last `context` tokens are read again for each new token.
//!
//! The new tokens of all texts form one row `[1, tokens]`. Layers that work per token process them together, and the
//! bits of a token do not depend on the other tokens. Attention runs separately per text. So a text is the same in any
//! batch.
//!
//! [`GenerateConfig`] sets how tokens are sampled. Samples are a function of the seed, computed from the logits in f64.
//! Every layout generates the same text, provided that its logits are equal.

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
