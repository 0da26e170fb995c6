//! Text generation with a language model in any parallel layout.
//!
//! A [`Generator`] runs each rank's part of the model on the current texts, and samples the next token of each text.
//! With a [KV cache](burn_megatron::nn::KvCache), each token is read only once, until a text exceeds the context length
//! of the model. After that, the last `context` tokens are read again for each new token.
//!
//! The new tokens of all texts are concatenated to one sequence `[1, tokens]`. Linear layers and other per-token layers
//! process them together. The result for a token is bit-identical regardless of the other tokens. Attention runs
//! separately for each text. A text is therefore the same in any batch.
//!
//! [`GenerateConfig`] defines how tokens are sampled. The samples depend only on the seed and the logits, and are
//! computed in f64. All layouts generate the same text if their logits are equal.

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
