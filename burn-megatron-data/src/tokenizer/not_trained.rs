//! The type of trained tokenizers in a build without the feature `tokenizers`. It has no values.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use super::TokenizerError;
use super::error::BoxedError;

/// An empty type.
#[derive(Clone)]
pub(super) enum TrainedTokenizer {}

impl TrainedTokenizer {
    pub fn parse(file: &Path, _content: &[u8]) -> Result<Self, TokenizerError> {
        Err(TokenizerError::NotBuilt { path: file.into() })
    }

    pub fn vocabulary(&self) -> HashMap<String, u32> {
        match *self {}
    }

    pub fn id(&self, _token: &str) -> Option<u32> {
        match *self {}
    }

    pub fn encode(&self, _text: &str, _special: bool) -> Result<Vec<u32>, BoxedError> {
        match *self {}
    }

    pub fn frame(&self) -> Result<[Vec<u32>; 2], BoxedError> {
        match *self {}
    }

    pub fn encode_with_offsets(
        &self,
        _text: &str,
        _special: bool,
    ) -> Result<Vec<(u32, Range<usize>)>, BoxedError> {
        match *self {}
    }

    pub fn decode(&self, _tokens: &[u32], _skip_special: bool) -> Result<String, BoxedError> {
        match *self {}
    }

    pub fn special_names(&self) -> Vec<String> {
        match *self {}
    }
}
