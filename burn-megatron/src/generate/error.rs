//! What writing text can fail with.

use std::io;

use super::GenerateConfigError;
use crate::comm::CommError;
use crate::tokenizer::TokenizerError;

/// What writing text can fail with.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    /// The settings.
    #[error(transparent)]
    Config(#[from] GenerateConfigError),
    /// The tokenizer.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// Nothing to go on from.
    #[error("a prompt without a token gives the model nothing to read; one and more do")]
    NoPrompt,
    /// A token that the model does not know.
    #[error(
        "the prompt has the token {token}, and the model knows {vocabulary} tokens, from 0 on: the \
         tokenizer is of another model"
    )]
    Vocabulary {
        /// The token.
        token: u32,
        /// How many the model has.
        vocabulary: usize,
    },
    /// Logits that say nothing.
    #[error("after {after} tokens the model gives logits that are not numbers")]
    Logits {
        /// The tokens that it has read.
        after: usize,
    },
    /// The text cannot be shown.
    #[error("the text cannot be written: {0}")]
    Output(#[from] io::Error),
    /// The other ranks.
    #[error(transparent)]
    Comm(#[from] CommError),
}
