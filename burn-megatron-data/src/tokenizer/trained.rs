//! A trained tokenizer of the Hugging Face `tokenizers` library.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use tokenizers::{Encoding, Token};

use super::TokenizerError;
use super::error::BoxedError;

/// The tokenizer of a `tokenizer.json` file.
#[derive(Clone)]
pub(super) struct TrainedTokenizer(Box<tokenizers::Tokenizer>);

impl TrainedTokenizer {
    /// Parses a file. Its settings for truncation and padding are disabled.
    pub fn parse(file: &Path, content: &[u8]) -> Result<Self, TokenizerError> {
        // The library panics on some invalid files.
        let read = std::panic::catch_unwind(|| tokenizers::Tokenizer::from_bytes(content));
        let mut trained = match read {
            Ok(read) => read.map_err(|source| TokenizerError::invalid(file, source))?,
            Err(_) => return Err(TokenizerError::Panicked { path: file.into() }),
        };
        let off = trained.with_truncation(None).map(drop);
        off.map_err(|source| TokenizerError::invalid(file, source))?;
        trained.with_padding(None);
        Ok(Self(Box::new(trained)))
    }

    /// Returns each token with its id, including added tokens.
    pub fn vocabulary(&self) -> HashMap<String, u32> {
        self.0.get_vocab(true)
    }

    pub fn id(&self, token: &str) -> Option<u32> {
        self.0.token_to_id(token)
    }

    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, BoxedError> {
        // The fast variant does not compute offsets.
        let encoding = self.0.encode_fast(text, add_special_tokens)?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Returns the tokens that are added before and after a text.
    pub fn frame(&self) -> Result<[Vec<u32>; 2], BoxedError> {
        let text = Encoding::from_tokens(vec![Token::new(0, String::new(), (0, 0))], 0);
        let framed = self.0.post_process(text, None, true)?;
        let mut added = framed.get_special_tokens_mask().iter();
        let before = added.position(|added| *added == 0).unwrap_or(0);
        let [before, after] = [&framed.get_ids()[..before], &framed.get_ids()[before + 1..]];
        Ok([before.to_vec(), after.to_vec()])
    }

    /// Returns each token with its byte range in the text.
    pub fn encode_with_offsets(
        &self,
        text: &str,
        add_special_tokens: bool,
    ) -> Result<Vec<(u32, Range<usize>)>, BoxedError> {
        let encoding = self.0.encode(text, add_special_tokens)?;
        let offsets = encoding.get_offsets().iter();
        let offsets = offsets.map(|(begin, end)| *begin..*end);
        Ok(encoding.get_ids().iter().copied().zip(offsets).collect())
    }

    pub fn decode(&self, tokens: &[u32], skip_special_tokens: bool) -> Result<String, BoxedError> {
        self.0.decode(tokens, skip_special_tokens)
    }

    /// Returns the text of the special tokens, sorted by id.
    pub fn special_names(&self) -> Vec<String> {
        let decoder = self.0.get_added_tokens_decoder();
        let mut added: Vec<_> = decoder.iter().filter(|(_, token)| token.special).collect();
        added.sort_by_key(|(id, _)| **id);
        let names = added.into_iter().map(|(_, token)| token.content.clone());
        names.collect()
    }
}
