//! Text generation with a language model in any layout.
//!
//! A [`Generator`] runs each rank's part of the model on the text so far and samples the next token. With a cache of
//! [keys and values](crate::nn::KvCache) each token is read once, until the text is longer than the model's
//! context: then the last `context` tokens are read again for each new one.
//!
//! [`GenerateConfig`] sets how tokens are sampled. Samples are a function of the seed, computed from the logits
//! in f64, so every layout generates the same text as far as its logits are equal.
//!
//! The batch size is 1.

mod config;
mod error;
mod generator;
mod sampling;
mod stop;
#[cfg(test)]
mod tests;

pub use config::{GenerateConfig, GenerateConfigError};
pub use error::GenerateError;
pub use generator::{FinishReason, GenerationOutput, Generator};
