//! Text that comes token by token.

use super::{Tokenizer, TokenizerError};

/// What stands for bytes that are not, or not yet, a character.
const REPLACEMENT: char = char::REPLACEMENT_CHARACTER;

/// Gives the text of tokens as they come, character by whole character; made by [`Tokenizer::stream`].
///
/// What it gives, and what [`finish`](Self::finish) gives at the end, is [`Tokenizer::decode`] of all
/// tokens. It works on the last few tokens alone, so that a long text costs no more per token.
#[derive(Clone, Debug)]
pub struct Stream<'a> {
    tokenizer: &'a Tokenizer,
    /// The last tokens: a token's text depends on whether another one is before it.
    pub(super) tokens: Vec<u32>,
    /// What was given of their text.
    given: String,
    /// How many of them stand before the newest ones whose text was given whole.
    settled: usize,
}

impl<'a> Stream<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer) -> Self {
        Self {
            tokenizer,
            tokens: vec![],
            given: String::new(),
            settled: 0,
        }
    }

    /// The text that is certain since the last call; empty while a character is not whole, and for
    /// special tokens.
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

    /// What is left: U+FFFD for bytes that never became a character.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::Decode`].
    pub fn finish(self) -> Result<String, TokenizerError> {
        Ok(beyond(&self.tokenizer.decode(&self.tokens)?, &self.given))
    }

    /// Forgets the tokens before the newest, all of which have been given as text.
    fn forget(&mut self) -> Result<(), TokenizerError> {
        let newest = &self.tokens[self.settled..];
        let text = self.tokenizer.decode(newest)?;
        // Tokens without text could not stand for what is before the next one.
        if !text.is_empty() {
            self.tokens.drain(..self.settled);
            self.settled = self.tokens.len();
            self.given = text;
        }
        Ok(())
    }
}

/// What `text` has after `given`. A tokenizer may see an earlier character in another light, as when
/// bytes that were one are followed by some that are none: that one stays as it was given.
fn beyond(text: &str, given: &str) -> String {
    match text.strip_prefix(given) {
        Some(new) => new.into(),
        None => text.chars().skip(given.chars().count()).collect(),
    }
}
