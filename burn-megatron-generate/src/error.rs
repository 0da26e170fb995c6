//! The errors of text generation.

use std::io;

use super::GenerateConfigError;
use burn_megatron::comm::CommError;
use burn_megatron_data::tokenizer::TokenizerError;

/// The error of text generation.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    /// A setting is invalid.
    #[error(transparent)]
    Config(#[from] GenerateConfigError),
    /// The tokenizer could not encode or decode a text.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The prompt contains no tokens.
    #[error("the prompt has no tokens: expected at least 1")]
    NoPrompt,
    /// The batch size is 0.
    #[error("invalid batch_size = 0: expected at least 1")]
    BatchSize,
    /// Speculative decoding is enabled, but the model has no multi-token prediction module that can draft tokens.
    #[error(
        "speculative = true requires a model with multi-token prediction whose blocks support a KV cache: remove \
         speculative"
    )]
    NoDrafts,
    /// A token of the prompt is outside of the vocabulary of the model.
    #[error(
        "the prompt has the token {token}, but the vocabulary of the model has {vocabulary} tokens: the tokenizer \
         belongs to another model"
    )]
    Vocabulary {
        /// The id of the token.
        token: u32,
        /// The vocabulary size of the model.
        vocabulary: usize,
    },
    /// The logits contain NaN, or the largest logit is infinite.
    #[error("the logits after {after} tokens are not finite")]
    Logits {
        /// The number of tokens that were read before these logits.
        after: usize,
    },
    /// The text cannot be written to the output.
    #[error("cannot write the text: {0}")]
    Output(#[from] io::Error),
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] CommError),
}
