//! From text to tokens and back.
//!
//! A [`Tokenizer`] is a `tokenizer.json` of the Hugging Face library, or bytes, each of which is a token.
//! A [`Stream`] gives the text of tokens as they come, and [`TokenFileInfo`] says what made a pair of token
//! files.
//!
//! ```
//! use burn_megatron::tokenizer::Tokenizer;
//!
//! let bytes = Tokenizer::bytes();
//! let tokens = bytes.encode("né")?;
//! assert_eq!(tokens, [110, 195, 169]);
//! let mut stream = bytes.stream();
//! let text = tokens.iter().map(|token| stream.push(*token)).collect::<Result<Vec<_>, _>>()?;
//! assert_eq!(text, ["n", "", "é"]); // half a character is no text
//! # Ok::<(), burn_megatron::tokenizer::TokenizerError>(())
//! ```

mod error;
mod info;
mod special;
mod stream;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::xxh3_64;

use crate::bounded;
pub use error::TokenizerError;
pub use info::{InfoError, TokenFileInfo};
pub use special::SpecialTokens;
pub use stream::Stream;

/// The name of the tokenizer whose tokens are bytes.
pub const BYTES: &str = "bytes";

/// The token that ends a document of bytes, which are text and have no zeros.
const BYTES_EOD: u32 = 0;

/// The file that a folder has its tokenizer in.
const FILE: &str = "tokenizer.json";

/// The largest file of a tokenizer that is read: many times what any has.
const LARGEST_FILE: u64 = 1 << 30;

/// Text to tokens, and tokens to text.
///
/// A clone remembers words that it has met by itself, so that threads do not wait for each other.
#[derive(Clone)]
pub struct Tokenizer {
    kind: Kind,
    name: String,
    special: SpecialTokens,
    vocabulary: usize,
    fingerprint: u64,
}

#[derive(Clone)]
enum Kind {
    Bytes,
    Trained(Box<tokenizers::Tokenizer>),
}

impl Tokenizer {
    /// Each byte is a token: 256 of them, of which 0 ends a document.
    pub fn bytes() -> Self {
        Self {
            kind: Kind::Bytes,
            name: BYTES.into(),
            special: SpecialTokens {
                eod: Some(BYTES_EOD),
                ..SpecialTokens::default()
            },
            vocabulary: 256,
            fingerprint: xxh3_64(BYTES.as_bytes()),
        }
    }

    /// [`Tokenizer::bytes`] for the name [`BYTES`]; any other is a path to [`open`](Self::open).
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    pub fn named(name: &str) -> Result<Self, TokenizerError> {
        match name {
            BYTES => Ok(Self::bytes()),
            path => Self::open(path.as_ref()),
        }
    }

    /// Reads a `tokenizer.json`, or that of a folder.
    ///
    /// Which tokens begin and end a text stands in the files beside it, of which all may be missing:
    /// `tokenizer_config.json` before `special_tokens_map.json` before `config.json`. What the file says
    /// of the longest text and of padding has no effect: a text has all of its tokens, and no others.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::Missing`], [`TokenizerError::Unreadable`], [`TokenizerError::Invalid`],
    /// [`TokenizerError::Panicked`] or [`TokenizerError::UnknownToken`], which name the file.
    pub fn open(path: &Path) -> Result<Self, TokenizerError> {
        let file = file_of(path)?;
        let content = bounded::read(&file, LARGEST_FILE)
            .map_err(|source| TokenizerError::unreadable(&file, source))?;
        let beside = special::beside(file.parent().unwrap_or(Path::new(".")))?;
        Self::parse(path, &file, &content, &beside)
    }

    /// As [`open`](Self::open) of a folder, from the contents of its files by name: `tokenizer.json` and
    /// those that may stand beside it. Others have no effect. `name` is what the tokenizer is called, and
    /// the folder of the files in errors.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open), but for [`TokenizerError::Unreadable`].
    pub fn from_files(
        name: &Path,
        files: &BTreeMap<String, Vec<u8>>,
    ) -> Result<Self, TokenizerError> {
        let path = name.join(FILE);
        match files.get(FILE) {
            Some(content) => Self::parse(name, &path, content, files),
            None => Err(TokenizerError::Missing { path }),
        }
    }

    /// The tokenizer of a file with this content, and of files beside it.
    fn parse(
        name: &Path,
        file: &Path,
        content: &[u8],
        beside: &BTreeMap<String, Vec<u8>>,
    ) -> Result<Self, TokenizerError> {
        let mut trained = parse(file, content)?;
        let off = trained.with_truncation(None).map(drop);
        off.map_err(|source| TokenizerError::invalid(file, source))?;
        trained.with_padding(None);
        let vocabulary = trained.get_vocab(true);
        let largest = vocabulary.values().max();
        let largest = largest.ok_or_else(|| TokenizerError::invalid(file, "it has no tokens"))?;
        let folder = file.parent().unwrap_or(Path::new("."));
        Ok(Self {
            special: special::parse(folder, beside, &vocabulary)?,
            vocabulary: *largest as usize + 1,
            kind: Kind::Trained(Box::new(trained)),
            name: name.display().to_string(),
            fingerprint: xxh3_64(content),
        })
    }

    /// The same with `token`, as it is written, as the end of a document.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::NoSuchToken`].
    pub fn with_eod(mut self, token: &str) -> Result<Self, TokenizerError> {
        let id = self.id(token).ok_or_else(|| TokenizerError::NoSuchToken {
            tokenizer: self.name.clone(),
            token: token.into(),
            special: self.special_names(),
        })?;
        self.special.eod = Some(id);
        Ok(self)
    }

    /// [`BYTES`], or the path that it was opened from.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether each byte is a token.
    pub fn is_bytes(&self) -> bool {
        matches!(self.kind, Kind::Bytes)
    }

    /// Tokens are below this: added tokens count, and holes in the numbering too.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// 64-bit XXH3 of the file: equal where the tokenizer is.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// The tokens that begin and end texts.
    pub fn special(&self) -> &SpecialTokens {
        &self.special
    }

    /// The token that ends a document, where one is known.
    pub fn eod(&self) -> Option<u32> {
        self.special.eod
    }

    /// The number of a token, as it is written in the vocabulary.
    pub fn id(&self, token: &str) -> Option<u32> {
        match (&self.kind, token.as_bytes()) {
            (Kind::Bytes, [byte]) => Some(u32::from(*byte)),
            (Kind::Bytes, _) => None,
            (Kind::Trained(trained), _) => trained.token_to_id(token),
        }
    }

    /// The tokens of a text, and no others. What the text has of the written form of special tokens
    /// becomes these, as everywhere with such files.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::Encode`] where a tokenizer has no token for something, not even one for what is
    /// unknown.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        self.encode_as(text, false)
    }

    /// The tokens of a text, framed by those that the tokenizer puts around one, such as `<s>`.
    ///
    /// # Errors
    ///
    /// As [`encode`](Self::encode).
    pub fn encode_framed(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        self.encode_as(text, true)
    }

    /// As [`encode`](Self::encode), or [`encode_framed`](Self::encode_framed) where `framed`, from bytes,
    /// which must be UTF-8 unless each byte is a token.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::NotUtf8`], and as [`encode`](Self::encode).
    pub fn encode_bytes(&self, text: &[u8], framed: bool) -> Result<Vec<u32>, TokenizerError> {
        match &self.kind {
            Kind::Bytes => Ok(text.iter().map(|byte| u32::from(*byte)).collect()),
            Kind::Trained(_) => {
                let text = std::str::from_utf8(text)
                    .map_err(|error| TokenizerError::NotUtf8(error.valid_up_to()))?;
                self.encode_as(text, framed)
            }
        }
    }

    fn encode_as(&self, text: &str, framed: bool) -> Result<Vec<u32>, TokenizerError> {
        match &self.kind {
            Kind::Bytes => Ok(text.bytes().map(u32::from).collect()),
            // The fast form leaves out where in the text a token was.
            Kind::Trained(trained) => match trained.encode_fast(text, framed) {
                Ok(encoding) => Ok(encoding.get_ids().to_vec()),
                Err(source) => Err(TokenizerError::Encode {
                    tokenizer: self.name.clone(),
                    source,
                }),
            },
        }
    }

    /// The text of tokens without special ones, as the library of the file's format has it. A number
    /// without a token gives no text: a model may have more rows than its tokenizer has tokens. Bytes
    /// that are not UTF-8 become U+FFFD.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::Decode`] where the tokenizer cannot.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, TokenizerError> {
        self.decode_as(tokens, true)
    }

    /// As [`decode`](Self::decode), with special tokens as they are written.
    ///
    /// # Errors
    ///
    /// As [`decode`](Self::decode).
    pub fn decode_whole(&self, tokens: &[u32]) -> Result<String, TokenizerError> {
        self.decode_as(tokens, false)
    }

    fn decode_as(&self, tokens: &[u32], without_special: bool) -> Result<String, TokenizerError> {
        match &self.kind {
            Kind::Bytes => {
                let bytes = tokens.iter().filter_map(|token| u8::try_from(*token).ok());
                let bytes: Vec<u8> = bytes.collect();
                Ok(match String::from_utf8_lossy(&bytes) {
                    Cow::Borrowed(text) => text.into(),
                    Cow::Owned(text) => text,
                })
            }
            Kind::Trained(trained) => {
                let text = trained.decode(tokens, without_special);
                text.map_err(|source| TokenizerError::Decode {
                    tokenizer: self.name.clone(),
                    source,
                })
            }
        }
    }

    /// Gives the text of tokens that come one by one.
    pub fn stream(&self) -> Stream<'_> {
        Stream::new(self)
    }

    /// The special tokens as they are written, in the order of their numbers, at most ten.
    fn special_names(&self) -> Vec<String> {
        let Kind::Trained(trained) = &self.kind else {
            return vec![];
        };
        let added = trained.get_added_tokens_decoder();
        let mut added: Vec<_> = added.iter().filter(|(_, token)| token.special).collect();
        added.sort_by_key(|(id, _)| **id);
        let names = added.into_iter().map(|(_, token)| token.content.clone());
        names.take(10).collect()
    }
}

/// The path itself, or the file in the folder there.
fn file_of(path: &Path) -> Result<PathBuf, TokenizerError> {
    let file = match path.is_dir() {
        true => path.join(FILE),
        false => path.to_path_buf(),
    };
    match file.exists() {
        true => Ok(file),
        false => Err(TokenizerError::Missing { path: file }),
    }
}

/// The library's reader expects of some parts what it does not check.
fn parse(file: &Path, content: &[u8]) -> Result<tokenizers::Tokenizer, TokenizerError> {
    let read = std::panic::catch_unwind(|| tokenizers::Tokenizer::from_bytes(content));
    match read {
        Ok(read) => read.map_err(|source| TokenizerError::invalid(file, source)),
        Err(_) => Err(TokenizerError::Panicked { path: file.into() }),
    }
}

/// Names the tokenizer instead of printing its tokens.
impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("name", &self.name)
            .field("vocabulary", &self.vocabulary)
            .field("special", &self.special)
            .finish_non_exhaustive()
    }
}
