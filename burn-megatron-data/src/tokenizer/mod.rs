//! Encodes text as tokens and decodes tokens to text.
//!
//! A [`Tokenizer`] is a `tokenizer.json` of the Hugging Face library, or encodes each byte as a token.
//! A [`DecodeStream`] decodes incrementally, [`TokenFileInfo`] is the sidecar of token files, and `chat` has the
//! templates of conversations. The feature `tokenizers` builds what reads a `tokenizer.json`, and `chat`; without it
//! there are bytes.
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

/// The largest file that is read, which is far beyond usual sizes.
const MAX_FILE_BYTES: u64 = 1 << 30;

/// Encodes text as tokens and decodes tokens to text.
///
/// Each clone has its own cache of words, so that threads do not contend for it.
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
    /// The byte-level tokenizer: 256 tokens, of which 0 ends a document.
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

    /// [`Tokenizer::bytes`] for the name [`BYTES`]; otherwise [`open`](Self::open) of a path.
    ///
    /// # Errors
    ///
    /// See [`open`](Self::open).
    pub fn named(name: &str) -> Result<Self, TokenizerError> {
        match name {
            BYTES => Ok(Self::bytes()),
            path => Self::open(path.as_ref()),
        }
    }

    /// Reads a `tokenizer.json`, given by its path or its folder.
    ///
    /// Special tokens are taken from optional files in the same folder: `tokenizer_config.json` before
    /// `special_tokens_map.json` before `config.json`. The file's settings of truncation and padding are ignored:
    /// texts are never truncated or padded.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::Missing`], [`TokenizerError::Unreadable`], [`TokenizerError::Invalid`],
    /// [`TokenizerError::Panicked`] or [`TokenizerError::UnknownToken`], which name the file; without the feature
    /// `tokenizers` [`TokenizerError::NotBuilt`].
    pub fn open(path: &Path) -> Result<Self, TokenizerError> {
        let file = file_of(path)?;
        let content = regular_file::read(&file, MAX_FILE_BYTES)
            .map_err(|source| TokenizerError::unreadable(&file, source))?;
        let beside = special::beside(file.parent().unwrap_or(Path::new(".")))?;
        Self::parse(path, &file, &content, &beside)
    }

    /// As [`open`](Self::open) of a folder, from the contents of its files by name: `tokenizer.json` and its
    /// optional companions. Other files are ignored. `name` becomes the tokenizer's name, and the folder in
    /// errors.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open), except [`TokenizerError::Unreadable`].
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

    /// Builds a tokenizer from the content of its file and of the companion files.
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

    /// Sets the end-of-document token, given as text.
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

    /// [`BYTES`], or the path from which it was opened.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether this is the byte-level tokenizer.
    pub fn is_bytes(&self) -> bool {
        matches!(self.kind, TokenizerKind::Bytes)
    }

    /// The largest token id + 1, including added tokens and unused ids.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// 64-bit XXH3 of the file.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// The special tokens.
    pub fn special(&self) -> &SpecialTokens {
        &self.special
    }

    /// The end-of-document token, if known.
    pub fn eod(&self) -> Option<u32> {
        self.special.eod
    }

    /// The id of a token, given as text.
    pub fn id(&self, token: &str) -> Option<u32> {
        match (&self.kind, token.as_bytes()) {
            (TokenizerKind::Bytes, [byte]) => Some(u32::from(*byte)),
            (TokenizerKind::Bytes, _) => None,
            (TokenizerKind::Trained(trained), _) => trained.id(token),
        }
    }

    /// Encodes a text, without adding special tokens. Special tokens that are written in the text are
    /// recognized, as in the Hugging Face library.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::Encode`] if the tokenizer has no token for a part of the text, nor an unknown token.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        self.encode_as(text, false)
    }

    /// Encodes a text, and adds the tokenizer's special tokens around it, such as `<s>`.
    ///
    /// # Errors
    ///
    /// See [`encode`](Self::encode).
    pub fn encode_with_special_tokens(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        self.encode_as(text, true)
    }

    /// Returns the special tokens that [`encode_with_special_tokens`](Self::encode_with_special_tokens) adds before and after
    /// a text.
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

    /// As [`encode`](Self::encode), or as [`encode_with_special_tokens`](Self::encode_with_special_tokens) if
    /// `add_special_tokens`, each token with the bytes of the text that it stands for: none for one that is added.
    ///
    /// # Errors
    ///
    /// See [`encode`](Self::encode).
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

    /// As [`encode`](Self::encode), or as [`encode_with_special_tokens`](Self::encode_with_special_tokens) if `add_special_tokens`, from
    /// bytes. They must be UTF-8, except for the byte-level tokenizer.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::NotUtf8`], and as [`encode`](Self::encode).
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

    /// Decodes tokens without special ones, as the Hugging Face library does. Ids without a token give no
    /// text, as a model may have more rows than its tokenizer has tokens. Invalid UTF-8 becomes U+FFFD.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::Decode`] if the tokenizer cannot decode them.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, TokenizerError> {
        self.decode_as(tokens, true)
    }

    /// As [`decode`](Self::decode), including special tokens.
    ///
    /// # Errors
    ///
    /// See [`decode`](Self::decode).
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

    /// A stream that decodes tokens one by one.
    pub fn stream(&self) -> DecodeStream<'_> {
        DecodeStream::new(self)
    }

    /// The text of up to ten special tokens, sorted by id.
    fn special_names(&self) -> Vec<String> {
        let TokenizerKind::Trained(trained) = &self.kind else {
            return vec![];
        };
        let mut names = trained.special_names();
        names.truncate(10);
        names
    }
}

/// The path itself, or the tokenizer file in the folder there.
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
