//! Errors of generation.

use std::io;

use super::GenerateConfigError;
use burn_megatron::comm::CommError;
use burn_megatron_data::tokenizer::TokenizerError;

/// An error of generation.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    /// Invalid settings.
    #[error(transparent)]
    Config(#[from] GenerateConfigError),
    /// The tokenizer failed.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The prompt is empty.
    #[error("the prompt has no tokens: expected at least 1")]
    NoPrompt,
    /// The batch size is 0.
    #[error("invalid batch_size = 0: expected at least 1")]
    BatchSize,
    /// Speculation requires multi-token prediction modules.
    #[error(
        "speculative = true requires a model with multi-token prediction whose blocks read a cache: remove speculative"
    )]
    NoDrafts,
    /// The prompt has a token beyond the model's vocabulary.
    #[error(
        "the prompt has the token {token}, but the vocabulary of the model has {vocabulary}: the tokenizer \
         belongs to another model"
    )]
    Vocabulary {
        /// The token.
        token: u32,
        /// The size of the vocabulary.
        vocabulary: usize,
    },
    /// The logits are NaN or infinite.
    #[error("the logits after {after} tokens are not finite")]
    Logits {
        /// The number of tokens read.
        after: usize,
    },
    /// The text cannot be written to the output.
    #[error("cannot write the text: {0}")]
    Output(#[from] io::Error),
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] CommError),
}
