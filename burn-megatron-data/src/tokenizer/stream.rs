//! Incremental decoding.

use super::{Tokenizer, TokenizerError};

/// The replacement for bytes that are not, or not yet, a character.
const REPLACEMENT: char = char::REPLACEMENT_CHARACTER;

/// Decodes tokens incrementally, by whole characters; made by [`Tokenizer::stream`].
///
/// All text returned, including that of [`finish`](Self::finish), equals [`Tokenizer::decode`] of all tokens.
/// Only the last few tokens are decoded again, so the cost per token does not grow.
#[derive(Clone, Debug)]
pub struct DecodeStream<'a> {
    tokenizer: &'a Tokenizer,
    /// The last tokens: the text of a token may depend on the one before it.
    pub(super) tokens: Vec<u32>,
    /// Their text that was returned.
    given: String,
    /// The number of tokens before the last ones whose text was returned completely.
    settled: usize,
}

impl<'a> DecodeStream<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer) -> Self {
        Self {
            tokenizer,
            tokens: vec![],
            given: String::new(),
            settled: 0,
        }
    }

    /// Adds a token; returns the text that is certain since the last call. Empty for an incomplete character
    /// and for special tokens.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::Decode`].
    pub fn push(&mut self, token: u32) -> Result<String, TokenizerError> {
        self.tokens.push(token);
        let text = self.tokenizer.decode(&self.tokens)?;
        let certain = text.trim_end_matches(REPLACEMENT);
        let new = beyond(certain, &self.given);
        if !new.is_empty() {
            self.given = certain.into();
            if certain.len() == text.len() {
                self.forget()?;
            }
        }
        Ok(new)
    }

    /// The rest of the text: U+FFFD for incomplete characters.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::Decode`].
    pub fn finish(self) -> Result<String, TokenizerError> {
        Ok(beyond(&self.tokenizer.decode(&self.tokens)?, &self.given))
    }

    /// Drops the tokens before the last ones, whose text was returned.
    fn forget(&mut self) -> Result<(), TokenizerError> {
        let newest = &self.tokens[self.settled..];
        let text = self.tokenizer.decode(newest)?;
        // Tokens without text cannot serve as context for the next one.
        if !text.is_empty() {
            self.tokens.drain(..self.settled);
            self.settled = self.tokens.len();
            self.given = text;
        }
        Ok(())
    }
}

/// The part of `text` after `given`. If the tokenizer changed an earlier character, as when valid bytes are
/// followed by invalid ones, the returned text is kept.
fn beyond(text: &str, given: &str) -> String {
    match text.strip_prefix(given) {
        Some(new) => new.into(),
        None => text.chars().skip(given.chars().count()).collect(),
    }
}
