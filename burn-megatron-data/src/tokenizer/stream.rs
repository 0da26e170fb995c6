//! Decodes tokens to text incrementally.

use super::{Tokenizer, TokenizerError};

/// The replacement for bytes that are not a character, or not yet.
const REPLACEMENT: char = char::REPLACEMENT_CHARACTER;

/// A stream that decodes tokens to text incrementally and returns only complete characters. Create a stream with
/// [`Tokenizer::stream`].
///
/// The concatenation of all returned texts, including the text of [`finish`](Self::finish), is equal to the result of
/// [`Tokenizer::decode`] for all tokens. For each new token, only the last few tokens are decoded again, so the cost
/// per token is constant.
#[derive(Clone, Debug)]
pub struct DecodeStream<'a> {
    tokenizer: &'a Tokenizer,
    /// The last tokens. The text of a token may depend on the token before it.
    pub(super) tokens: Vec<u32>,
    /// The part of their text that was returned.
    given: String,
    /// The number of earlier tokens, whose text was returned completely.
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

    /// Adds a token, and returns the next part of the text, which later tokens cannot change. The part is empty after
    /// an incomplete character and after a special token.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::Decode`] if the tokens cannot be decoded.
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

    /// Returns the rest of the text. Incomplete characters are replaced by U+FFFD.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::Decode`] if the tokens cannot be decoded.
    pub fn finish(self) -> Result<String, TokenizerError> {
        Ok(beyond(&self.tokenizer.decode(&self.tokens)?, &self.given))
    }

    /// Drops earlier tokens, whose text was returned.
    fn forget(&mut self) -> Result<(), TokenizerError> {
        let newest = &self.tokens[self.settled..];
        let text = self.tokenizer.decode(newest)?;
        // Tokens without text cannot serve as context for the next token.
        if !text.is_empty() {
            self.tokens.drain(..self.settled);
            self.settled = self.tokens.len();
            self.given = text;
        }
        Ok(())
    }
}

/// Returns the part of `text` after `given`. If the tokenizer changed an earlier character, the returned text is kept.
/// This occurs when valid bytes are followed by invalid bytes.
fn beyond(text: &str, given: &str) -> String {
    match text.strip_prefix(given) {
        Some(new) => new.into(),
        None => text.chars().skip(given.chars().count()).collect(),
    }
}
