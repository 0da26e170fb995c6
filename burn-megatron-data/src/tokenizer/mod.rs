//! Tokenizers, which encode text as tokens and decode tokens to text.
//!
//! A [`Tokenizer`] is read from a `tokenizer.json` file of the Hugging Face library, or encodes each byte as a token. A
//! [`DecodeStream`] decodes tokens incrementally. [`TokenFileInfo`] is the content of the sidecar file of token files.
//! The module `chat` renders conversations with chat templates. The feature `tokenizers` enables `tokenizer.json` files
//! and `chat`. Without it, only the byte-level tokenizer is available.
//!
//! ```
//! use burn_megatron_data::tokenizer::Tokenizer;
//!
//! let bytes = Tokenizer::bytes();
//! let tokens = bytes.encode("né")?;
//! assert_eq!(tokens, [110, 195, 169]);
//! let mut stream = bytes.stream();
//! let text = tokens.iter().map(|token| stream.push(*token)).collect::<Result<Vec<_>, _>>()?;
//! assert_eq!(text, ["n", "", "é"]); // an incomplete character gives no text
//! # Ok::<(), burn_megatron_data::tokenizer::TokenizerError>(())
//! ```

#[cfg(feature = "tokenizers")]
pub mod chat;
mod error;
mod info;
mod special;
mod stream;
#[cfg(all(test, feature = "tokenizers"))]
mod tests;
#[cfg_attr(not(feature = "tokenizers"), path = "not_trained.rs")]
mod trained;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::xxh3_64;

use burn_megatron::regular_file;
use burn_megatron::regular_file::is_there;
pub use error::TokenizerError;
pub use info::{TokenFileInfo, TokenFileInfoError};
pub use special::SpecialTokens;
pub use stream::DecodeStream;
use trained::TrainedTokenizer;

/// The name of the byte-level tokenizer.
pub const BYTES: &str = "bytes";

/// The end-of-document token of the byte-level tokenizer: text has no zero bytes.
const BYTES_EOD: u32 = 0;

/// The name of a tokenizer file in a folder.
const FILE: &str = "tokenizer.json";

/// The maximum size of a tokenizer file, in bytes, far above usual sizes.
const MAX_FILE_BYTES: u64 = 1 << 30;

/// A tokenizer, which encodes text as tokens and decodes tokens to text.
///
/// Each clone has its own cache of words, so that threads do not compete for a shared cache.
#[derive(Clone)]
pub struct Tokenizer {
    kind: TokenizerKind,
    name: String,
    special: SpecialTokens,
    vocabulary: usize,
    fingerprint: u64,
}

#[derive(Clone)]
enum TokenizerKind {
    Bytes,
    Trained(TrainedTokenizer),
}

impl Tokenizer {
    /// Creates the byte-level tokenizer. It has 256 tokens, one for each byte value. Token 0 is the end-of-document
    /// token.
    pub fn bytes() -> Self {
        Self {
            kind: TokenizerKind::Bytes,
            name: BYTES.into(),
            special: SpecialTokens {
                eod: Some(BYTES_EOD),
                ..SpecialTokens::default()
            },
            vocabulary: 256,
            fingerprint: xxh3_64(BYTES.as_bytes()),
        }
    }

    /// Returns the [byte-level tokenizer](Self::bytes) if `name` is [`BYTES`]. Otherwise `name` is a path, which is
    /// [opened](Self::open).
    ///
    /// # Errors
    ///
    /// The errors of [`open`](Self::open).
    pub fn named(name: &str) -> Result<Self, TokenizerError> {
        match name {
            BYTES => Ok(Self::bytes()),
            path => Self::open(path.as_ref()),
        }
    }

    /// Reads a tokenizer from a `tokenizer.json` file. `path` is the path of the file or of its folder.
    ///
    /// Special tokens are taken from optional files in the same folder, in this order of precedence:
    /// `tokenizer_config.json`, `special_tokens_map.json`, `config.json`. The settings for truncation and padding in
    /// the file are ignored: texts are never truncated or padded.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::Missing`], [`TokenizerError::Unreadable`], [`TokenizerError::Invalid`],
    /// [`TokenizerError::Panicked`] or [`TokenizerError::UnknownToken`], with the path of the file.
    /// [`TokenizerError::NotBuilt`] without the feature `tokenizers`.
    pub fn open(path: &Path) -> Result<Self, TokenizerError> {
        let file = file_of(path)?;
        let content = regular_file::read(&file, MAX_FILE_BYTES)
            .map_err(|source| TokenizerError::unreadable(&file, source))?;
        let beside = special::beside(file.parent().unwrap_or(Path::new(".")))?;
        Self::parse(path, &file, &content, &beside)
    }

    /// Creates a tokenizer like [`open`](Self::open), from the contents of its files. `files` maps the names of the
    /// files to their contents: `tokenizer.json` and the optional files. Other files are ignored. `name` becomes the
    /// name of the tokenizer. In errors, `name` is the folder of the files.
    ///
    /// # Errors
    ///
    /// The errors of [`open`](Self::open), except [`TokenizerError::Unreadable`].
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

    /// Builds a tokenizer from the contents of its file and of the companion files.
    fn parse(
        name: &Path,
        file: &Path,
        content: &[u8],
        beside: &BTreeMap<String, Vec<u8>>,
    ) -> Result<Self, TokenizerError> {
        let trained = TrainedTokenizer::parse(file, content)?;
        let vocabulary = trained.vocabulary();
        let largest = vocabulary
            .values()
            .max()
            .ok_or_else(|| TokenizerError::invalid(file, "it has no tokens"))?;
        let folder = file.parent().unwrap_or(Path::new("."));
        Ok(Self {
            special: special::parse(folder, beside, &vocabulary)?,
            vocabulary: *largest as usize + 1,
            kind: TokenizerKind::Trained(trained),
            name: name.display().to_string(),
            fingerprint: xxh3_64(content),
        })
    }

    /// Sets the end-of-document token. `token` is the text of the token.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::NoSuchToken`] if the vocabulary does not contain the token.
    pub fn with_eod(mut self, token: &str) -> Result<Self, TokenizerError> {
        let id = self.id(token).ok_or_else(|| TokenizerError::NoSuchToken {
            tokenizer: self.name.clone(),
            token: token.into(),
            special: self.special_names(),
        })?;
        self.special.eod = Some(id);
        Ok(self)
    }

    /// Returns the name of the tokenizer: [`BYTES`], or the path from which the tokenizer was opened.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns whether this is the byte-level tokenizer.
    pub fn is_bytes(&self) -> bool {
        matches!(self.kind, TokenizerKind::Bytes)
    }

    /// Returns the vocabulary size: the largest token id plus 1. It includes added tokens and unused ids.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// Returns the 64-bit XXH3 hash of the tokenizer file.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// Returns the special tokens of the tokenizer.
    pub fn special(&self) -> &SpecialTokens {
        &self.special
    }

    /// Returns the end-of-document token, or `None` if it is unknown.
    pub fn eod(&self) -> Option<u32> {
        self.special.eod
    }

    /// Returns the id of the token with this text, or `None` if the vocabulary does not contain the token.
    pub fn id(&self, token: &str) -> Option<u32> {
        match (&self.kind, token.as_bytes()) {
            (TokenizerKind::Bytes, [byte]) => Some(u32::from(*byte)),
            (TokenizerKind::Bytes, _) => None,
            (TokenizerKind::Trained(trained), _) => trained.id(token),
        }
    }

    /// Encodes a text without adding special tokens. Special tokens that occur in the text are recognized, as in the
    /// Hugging Face library.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::Encode`] if the tokenizer has no token for a part of the text, and no token for unknown text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        self.encode_as(text, false)
    }

    /// Encodes a text, and adds the special tokens of the tokenizer before and after the text, such as `<s>`.
    ///
    /// # Errors
    ///
    /// The errors of [`encode`](Self::encode).
    pub fn encode_with_special_tokens(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        self.encode_as(text, true)
    }

    /// Returns two lists: the special tokens that [`encode_with_special_tokens`](Self::encode_with_special_tokens) adds
    /// before a text and after a text.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::Encode`] if the post-processor of the tokenizer fails.
    pub fn frame(&self) -> Result<[Vec<u32>; 2], TokenizerError> {
        match &self.kind {
            TokenizerKind::Bytes => Ok([vec![], vec![]]),
            TokenizerKind::Trained(trained) => {
                let frame = trained.frame();
                frame.map_err(|source| self.not_encoded(source))
            }
        }
    }

    /// Encodes a text like [`encode`](Self::encode), or like
    /// [`encode_with_special_tokens`](Self::encode_with_special_tokens) if `add_special_tokens` is set. Each token is
    /// returned with its byte range in the text. The range of an added special token is empty.
    ///
    /// # Errors
    ///
    /// The errors of [`encode`](Self::encode).
    pub fn encode_with_offsets(
        &self,
        text: &str,
        add_special_tokens: bool,
    ) -> Result<Vec<(u32, Range<usize>)>, TokenizerError> {
        let TokenizerKind::Trained(trained) = &self.kind else {
            let bytes = text.bytes().enumerate();
            return Ok(bytes
                .map(|(at, byte)| (u32::from(byte), at..at + 1))
                .collect());
        };
        let encoded = trained.encode_with_offsets(text, add_special_tokens);
        encoded.map_err(|source| self.not_encoded(source))
    }

    /// Encodes bytes like [`encode`](Self::encode), or like
    /// [`encode_with_special_tokens`](Self::encode_with_special_tokens) if `add_special_tokens` is set. The bytes must
    /// be UTF-8, except for the byte-level tokenizer.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::NotUtf8`] if the bytes are not UTF-8, and the errors of [`encode`](Self::encode).
    pub fn encode_bytes(
        &self,
        text: &[u8],
        add_special_tokens: bool,
    ) -> Result<Vec<u32>, TokenizerError> {
        match &self.kind {
            TokenizerKind::Bytes => Ok(text.iter().map(|byte| u32::from(*byte)).collect()),
            TokenizerKind::Trained(_) => {
                let text = std::str::from_utf8(text)
                    .map_err(|error| TokenizerError::NotUtf8(error.valid_up_to()))?;
                self.encode_as(text, add_special_tokens)
            }
        }
    }

    fn encode_as(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TokenizerError> {
        match &self.kind {
            TokenizerKind::Bytes => Ok(text.bytes().map(u32::from).collect()),
            TokenizerKind::Trained(trained) => {
                let encoded = trained.encode(text, add_special_tokens);
                encoded.map_err(|source| self.not_encoded(source))
            }
        }
    }

    fn not_encoded(&self, source: error::BoxedError) -> TokenizerError {
        TokenizerError::Encode {
            tokenizer: self.name.clone(),
            source,
        }
    }

    /// Decodes tokens to text. Special tokens are skipped, as in the Hugging Face library. Ids without a token are also
    /// skipped, because a model may have more embedding rows than its tokenizer has tokens. Invalid UTF-8 is replaced
    /// by U+FFFD.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::Decode`] if the tokenizer cannot decode the tokens.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, TokenizerError> {
        self.decode_as(tokens, true)
    }

    /// Decodes tokens to text like [`decode`](Self::decode), but includes the text of special tokens.
    ///
    /// # Errors
    ///
    /// The errors of [`decode`](Self::decode).
    pub fn decode_with_special_tokens(&self, tokens: &[u32]) -> Result<String, TokenizerError> {
        self.decode_as(tokens, false)
    }

    fn decode_as(
        &self,
        tokens: &[u32],
        skip_special_tokens: bool,
    ) -> Result<String, TokenizerError> {
        match &self.kind {
            TokenizerKind::Bytes => {
                let bytes: Vec<u8> = tokens
                    .iter()
                    .filter_map(|token| u8::try_from(*token).ok())
                    .collect();
                Ok(match String::from_utf8_lossy(&bytes) {
                    Cow::Borrowed(text) => text.into(),
                    Cow::Owned(text) => text,
                })
            }
            TokenizerKind::Trained(trained) => {
                let text = trained.decode(tokens, skip_special_tokens);
                text.map_err(|source| TokenizerError::Decode {
                    tokenizer: self.name.clone(),
                    source,
                })
            }
        }
    }

    /// Returns a stream that decodes tokens to text incrementally.
    pub fn stream(&self) -> DecodeStream<'_> {
        DecodeStream::new(self)
    }

    /// Returns the text of up to ten special tokens, sorted by id.
    fn special_names(&self) -> Vec<String> {
        let TokenizerKind::Trained(trained) = &self.kind else {
            return vec![];
        };
        let mut names = trained.special_names();
        names.truncate(10);
        names
    }
}

/// Returns the path, or the tokenizer file in the folder at this path.
fn file_of(path: &Path) -> Result<PathBuf, TokenizerError> {
    let file = if path.is_dir() {
        path.join(FILE)
    } else {
        path.to_path_buf()
    };
    if is_there(&file) {
        Ok(file)
    } else {
        Err(TokenizerError::Missing { path: file })
    }
}

/// Shows the name and the sizes, not the vocabulary.
impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("name", &self.name)
            .field("vocabulary", &self.vocabulary)
            .field("special", &self.special)
            .finish_non_exhaustive()
    }
}
