//! Text from a language model, in any layout.
//!
//! A [`Generator`] runs the model of each rank on what was written so far and draws the next token. What
//! it has read stays in a [cache](crate::nn::KvCache), so that each token is read once, until the text is
//! longer than the model's context: then the last `context` tokens are read again for each new one.
//!
//! [`GenerateConfig`] says how a token is drawn. The draws are a function of the seed, and are made from
//! logits in f64, so that every layout writes the same text as far as its logits are the same.
//!
//! One sequence is written at a time.

mod config;
mod error;
mod generator;
mod sampling;
mod stop;
#[cfg(test)]
mod tests;

pub use config::{GenerateConfig, GenerateConfigError};
pub use error::GenerateError;
pub use generator::{End, Generated, Generator};
