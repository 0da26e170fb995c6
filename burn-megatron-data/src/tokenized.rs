//! A tokenized text, split into a training part and a held-out part.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use indicatif::HumanCount;
use rayon::prelude::*;
use xxhash_rust::xxh3::Xxh3;

use super::sampler::start_of;
use super::text::{read_documents, window, windows};
use super::{DataError, Dataset, EXTENSIONS, Sample, Samples, Sampling, TextDocuments, TextPart};
use crate::tokenizer::{Tokenizer, TokenizerError};

/// A text in memory that was tokenized with a [`Tokenizer`].
///
/// The text is read and split like [`TextData`](super::TextData). By default, the special tokens of the tokenizer, such
/// as `<s>`, are added to each document. If the tokenizer has an end-of-document token, this token is appended to each
/// document. If the text does not fit into memory, use token files instead.
///
/// ```
/// use burn_megatron_data::tokenizer::Tokenizer;
/// use burn_megatron_data::{Dataset, Sampling, TextDocuments, TokenizedText};
///
/// let mut documents = TextDocuments::default();
/// documents.push(b"a.txt", "abc".repeat(100).as_bytes());
/// let text = TokenizedText::from_documents("memory".as_ref(), &documents, &Tokenizer::bytes(), true)?;
/// let samples = text.training(&Sampling { seq: 8, seed: 42, samples: 4 })?;
/// assert_eq!(samples.batch(0..4)?.tokens().len(), 4 * 8);
/// # Ok::<(), burn_megatron_data::DataError>(())
/// ```
pub struct TokenizedText {
    path: PathBuf,
    /// The beginning of the description.
    source: String,
    tokenizer: String,
    /// The part of the description about the special tokens around a document.
    frame: String,
    vocabulary: usize,
    training: Arc<[i32]>,
    held_out: Arc<[i32]>,
    bytes: usize,
    fingerprint: u64,
    holds_out: bool,
}

impl TokenizedText {
    /// Reads and tokenizes a file, or the files of a folder that have one of [`EXTENSIONS`]. Special tokens are added
    /// to each document. The result does not depend on the number of threads.
    ///
    /// # Errors
    ///
    /// The errors of [`TextData::open`](super::TextData::open), and [`DataError::Tokenizer`] if the text is not UTF-8.
    pub fn open(path: &Path, tokenizer: &Tokenizer) -> Result<Self, DataError> {
        Self::from_documents(path, &read_documents(path, &EXTENSIONS)?, tokenizer, true)
    }

    /// Tokenizes documents that were read from `path`. The path appears in descriptions and errors. If there is a
    /// single document, its held-out part begins at a character boundary. If `special_tokens` is true, the special
    /// tokens of the tokenizer are added to each document.
    ///
    /// # Errors
    ///
    /// [`DataError::Empty`] if no document has text, and [`DataError::Tokenizer`] if a document is not UTF-8.
    pub fn from_documents(
        path: &Path,
        documents: &TextDocuments,
        tokenizer: &Tokenizer,
        special_tokens: bool,
    ) -> Result<Self, DataError> {
        let parts = documents.split(path, |byte| byte & 0xc0 != 0x80)?;
        let all = parts.training.iter().chain(&parts.held_out);
        let bytes = all.map(|document| document.len()).sum();
        let failed = |source| DataError::Tokenizer {
            path: path.to_path_buf(),
            source,
        };
        let frame = tokenizer.frame().map_err(failed)?;
        let tokens = |documents: &[&[u8]]| {
            let frame = special_tokens.then_some(&frame);
            tokens_of(documents, tokenizer, frame).map_err(failed)
        };
        let (training, held_out) = (tokens(&parts.training)?, tokens(&parts.held_out)?);
        Ok(Self {
            path: path.to_path_buf(),
            source: documents.describe(path),
            tokenizer: tokenizer.name().into(),
            frame: describe_frame(&frame, special_tokens, tokenizer).map_err(failed)?,
            vocabulary: tokenizer.vocabulary(),
            fingerprint: fingerprint([&training, &held_out]),
            training: training.into(),
            held_out: held_out.into(),
            bytes,
            holds_out: documents.holds_out(),
        })
    }

    /// Returns the tokens of the training part, from which windows are sampled.
    pub fn training_tokens(&self) -> &[i32] {
        &self.training
    }

    /// Returns the tokens of the held-out part.
    pub fn held_out_tokens(&self) -> &[i32] {
        &self.held_out
    }

    fn check_length(&self, part: TextPart, seq: usize) -> Result<(), DataError> {
        let tokens = match part {
            TextPart::Training => self.training.len(),
            TextPart::HeldOut => self.held_out.len(),
        };
        match (seq, tokens > seq) {
            (0, _) => Err(DataError::ZeroLength),
            (_, true) => Ok(()),
            (_, false) => Err(DataError::TooFewTokens {
                path: self.path.clone(),
                part,
                tokens,
                seq,
                needed: seq.saturating_add(1),
            }),
        }
    }
}

/// Describes the special tokens around each document.
fn describe_frame(
    frame: &[Vec<u32>; 2],
    special_tokens: bool,
    tokenizer: &Tokenizer,
) -> Result<String, TokenizerError> {
    let mut parts = vec![];
    for (verb, tokens) in ["begins", "ends"].into_iter().zip(frame) {
        if !tokens.is_empty() {
            let tokens = tokenizer.decode_with_special_tokens(tokens)?;
            parts.push(format!("{verb} with {tokens}"));
        }
    }
    let each = if special_tokens { "each" } else { "no" };
    Ok(match parts.is_empty() {
        true => String::new(),
        false => format!("; {each} document {}", parts.join(" and ")),
    })
}

/// Tokenizes documents, with the special tokens of `frame` around each. The end-of-document token is not repeated.
fn tokens_of(
    documents: &[&[u8]],
    tokenizer: &Tokenizer,
    frame: Option<&[Vec<u32>; 2]>,
) -> Result<Vec<i32>, TokenizerError> {
    let last = frame.and_then(|[_, after]| after.last().copied());
    let eod = tokenizer.eod().filter(|eod| Some(*eod) != last);
    let tokens: Vec<Vec<u32>> = documents
        .par_iter()
        .map(|document| {
            let mut tokens = tokenizer.encode_bytes(document, frame.is_some())?;
            tokens.extend(eod);
            Ok(tokens)
        })
        .collect::<Result<_, _>>()?;
    let tokens = tokens.into_iter().flatten();
    Ok(tokens.map(|token| token as i32).collect())
}

fn fingerprint(parts: [&[i32]; 2]) -> u64 {
    let mut hash = Xxh3::new();
    for part in parts {
        hash.update(&(part.len() as u64).to_le_bytes());
        for token in part {
            hash.update(&token.to_le_bytes());
        }
    }
    hash.digest()
}

impl Dataset for TokenizedText {
    fn describe(&self) -> String {
        format!(
            "{}: {} tokens of {} to train on, {} held out, {:.2} bytes each{}",
            self.source,
            HumanCount(self.training.len() as u64),
            self.tokenizer,
            HumanCount(self.held_out.len() as u64),
            self.bytes_per_token(),
            self.frame,
        )
    }

    /// Returns the 64-bit XXH3 hash of the tokens.
    fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    fn bytes_per_token(&self) -> f64 {
        self.bytes as f64 / (self.training.len() + self.held_out.len()) as f64
    }

    fn training(&self, sampling: &Sampling) -> Result<Arc<dyn Samples>, DataError> {
        self.check_length(TextPart::Training, sampling.seq)?;
        Ok(Arc::new(TokenizedSamples {
            tokens: Arc::clone(&self.training),
            seq: sampling.seq,
            seed: sampling.seed,
        }))
    }

    /// Returns windows of the held-out text, as in [`TextData`](super::TextData). If there are more than `max` windows,
    /// evenly spaced windows are selected. The result is empty if nothing is held out.
    fn held_out(&self, seq: usize, max: usize) -> Result<Vec<Sample>, DataError> {
        if max == 0 || !self.holds_out {
            return Ok(vec![]);
        }
        self.check_length(TextPart::HeldOut, seq)?;
        Ok(windows(&self.held_out, seq, max))
    }
}

/// The training samples of a [`TokenizedText`]: windows that are drawn with replacement. The positions of the windows
/// are the same as in [`TextSamples`](super::TextSamples) for a text whose number of bytes equals the number of tokens.
#[derive(Clone)]
pub struct TokenizedSamples {
    tokens: Arc<[i32]>,
    seq: usize,
    seed: u64,
}

impl Samples for TokenizedSamples {
    fn seq(&self) -> usize {
        self.seq
    }

    fn sample(&self, number: u64) -> Result<Sample, DataError> {
        let starts = self.tokens.len() - self.seq;
        let start = start_of(self.seed, number, starts);
        Ok(window(&self.tokens, start, self.seq))
    }
}

/// Shows the path and the sizes, not the tokens.
impl fmt::Debug for TokenizedText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenizedText")
            .field("path", &self.path)
            .field("tokenizer", &self.tokenizer)
            .field("training_tokens", &self.training.len())
            .field("held_out_tokens", &self.held_out.len())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TextData;
    use burn_megatron_test_support::TestFolder;

    fn tokenizer() -> Tokenizer {
        let path = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/tests/fixtures/tokenizer/byte_bpe"
        );
        Tokenizer::open(path.as_ref()).unwrap()
    }

    #[test]
    fn tokens_have_the_text_of_the_documents() {
        let folder = TestFolder::new();
        let texts = ["the brown fox", "naïve 日本", "dog ", "over the lazy dog"];
        for (number, text) in texts.iter().enumerate() {
            folder.write(&format!("{number}.txt"), text.repeat(number + 1));
        }
        let (tokenizer, path) = (tokenizer(), folder.path());
        let text = TokenizedText::open(path, &tokenizer).unwrap();
        let bytes = TextData::open(path).unwrap();
        let decoded = |tokens: &[i32]| {
            let tokens: Vec<u32> = tokens.iter().map(|token| *token as u32).collect();
            assert_eq!(tokens.last(), Some(&0), "each document has its end");
            let text = tokenizer.decode_with_special_tokens(&tokens).unwrap();
            text.trim_end_matches("<|endoftext|>")
                .replace("<|endoftext|>", "\0")
                .into_bytes()
        };
        assert_eq!(decoded(text.training_tokens()), bytes.training_bytes());
        assert_eq!(decoded(text.held_out_tokens()), bytes.held_out_bytes());
        let all = text.training_tokens().len() + text.held_out_tokens().len();
        let length: usize = texts
            .iter()
            .enumerate()
            .map(|(i, t)| t.len() * (i + 1))
            .sum();
        assert_eq!(text.bytes_per_token(), length as f64 / all as f64);
        let again = TokenizedText::open(path, &tokenizer).unwrap();
        assert_eq!(again.fingerprint(), text.fingerprint());
        let other = TokenizedText::open(path, &Tokenizer::bytes()).unwrap();
        assert_ne!(other.fingerprint(), text.fingerprint());
    }

    /// The script `run_clm.py` of `transformers` does the same.
    #[test]
    fn documents_have_the_special_tokens_of_their_tokenizer() {
        let folder = TestFolder::new();
        for number in 0..20 {
            folder.write(&format!("{number}.txt"), "the dog ".repeat(1 + number % 3));
        }
        let path = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/tests/fixtures/tokenizer/byte_fallback"
        );
        let tokenizer = Tokenizer::open(path.as_ref()).unwrap();
        let documents = read_documents(folder.path(), &EXTENSIONS).unwrap();
        let of = |special| {
            let text =
                TokenizedText::from_documents(folder.path(), &documents, &tokenizer, special);
            text.unwrap()
        };
        let (with, without) = (of(true), of(false));
        let count = |tokens: &[i32], token: i32| tokens.iter().filter(|own| **own == token).count();
        let parts = |text: &TokenizedText| [text.training.clone(), text.held_out.clone()];
        for (with, without) in parts(&with).iter().zip(parts(&without)) {
            // `<s>` is 1, and `</s>`, which ends documents, is 2.
            let documents = count(&without, 2);
            assert_eq!(
                [count(with, 1), count(with, 2), count(&without, 1)],
                [documents, documents, 0]
            );
            assert!(documents > 0);
            let plain: Vec<_> = with.iter().copied().filter(|token| *token != 1).collect();
            assert_eq!((with[0], plain), (1, without.to_vec()));
        }
        assert!(
            with.describe().ends_with("; each document begins with <s>"),
            "{}",
            with.describe()
        );
        assert!(
            without
                .describe()
                .ends_with("; no document begins with <s>"),
            "{}",
            without.describe()
        );
    }

    #[test]
    fn the_split_of_a_file_keeps_characters_whole() {
        let folder = TestFolder::new();
        for after in 0..3 {
            // Two of the three lengths split a character at the tail.
            folder.write("text", "日".repeat(40) + &"x".repeat(after));
            let text = TokenizedText::open(&folder.path().join("text"), &tokenizer()).unwrap();
            let held_out: Vec<u32> = text.held_out.iter().map(|token| *token as u32).collect();
            let held_out = tokenizer().decode(&held_out).unwrap();
            assert_eq!(held_out, "日".repeat(4 - after.min(1)) + &"x".repeat(after));
        }
        folder.write("text", b"abc\xffdef".repeat(9));
        let error = TokenizedText::open(&folder.path().join("text"), &tokenizer())
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("text': the text is not UTF-8 from byte 3"),
            "{error}"
        );
    }

    #[test]
    fn samples_are_windows_of_the_training_tokens() {
        let folder = TestFolder::new();
        folder.write("text", "over the lazy dog and that fox ".repeat(30));
        let text = TokenizedText::open(&folder.path().join("text"), &tokenizer()).unwrap();
        let sampling = |seq, seed| Sampling {
            seq,
            seed,
            samples: 9,
        };
        let samples = text.training(&sampling(8, 3)).unwrap();
        for number in 0..50 {
            let sample = samples.sample(number).unwrap();
            assert_eq!(sample.tokens[1..], sample.targets[..7]);
            let all = [&sample.tokens[..], &sample.targets[7..]].concat();
            let tokens = text.training_tokens();
            assert!(tokens.windows(9).any(|window| window == all));
        }
        let other = text.training(&sampling(8, 4)).unwrap();
        let of = |samples: &Arc<dyn Samples>| samples.batch(0..9).unwrap();
        assert_ne!(of(&samples), of(&other));
        let tokens = text.training_tokens().len();
        let error = text
            .training(&sampling(tokens, 3))
            .err()
            .unwrap()
            .to_string();
        assert!(error.contains("or a sequence length of at most"), "{error}");
        assert!(text.held_out(8, 2).unwrap().len() == 2);
    }
}
