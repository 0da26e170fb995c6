//! Errors of sampling from token files.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use super::SplitPart;
use crate::tokenizer::TokenFileInfoError;

/// An error of sampling from token files.
#[derive(Debug, thiserror::Error)]
pub enum SamplingError {
    /// An invalid split.
    #[error(
        "invalid split '{0}': expected up to three shares of training, validation and test, such as 969,30,1"
    )]
    Split(String),
    /// The seed exceeds the range of NumPy's generator.
    #[error("a seed of {0} is too large for token files: at most {max}", max = u32::MAX)]
    Seed(u64),
    /// The part has too few tokens.
    #[error(
        "the {part} part of '{}' has {tokens} tokens in {sequences} sequences, but a sample of {seq} tokens needs {needed}: {}",
        prefix.display(), remedy(*sequences, *all_sequences)
    )]
    TooFewTokens {
        /// The prefix of the files.
        prefix: PathBuf,
        /// The part.
        part: SplitPart,
        /// The tokens of the part.
        tokens: u64,
        /// The sequences of the part.
        sequences: usize,
        /// The sequences of the file.
        all_sequences: usize,
        /// Tokens per sample.
        seq: usize,
        /// The tokens that one sample needs.
        needed: usize,
    },
    /// The share of the part is 0.
    #[error("the split {split} has no {part} part")]
    NoPart {
        /// The split.
        split: String,
        /// The part.
        part: SplitPart,
    },
    /// The total number of tokens overflows.
    #[error("{samples} samples of {seq} tokens overflow 63 bits")]
    TooLarge {
        /// The requested samples.
        samples: u64,
        /// Tokens per sample.
        seq: u64,
    },
    /// There are more sequences than a document index can address.
    #[error("{sequences} sequences are too many for a document index: at most {max} in a file", max = i32::MAX)]
    TooManySequences {
        /// The number of sequences.
        sequences: usize,
    },
    /// The sample index is out of range.
    #[error("there is no sample {number}: there are {samples}")]
    NoSuchSample {
        /// The sample, from 0.
        number: u64,
        /// The number of samples.
        samples: u64,
    },
    /// The option needs an end-of-document token, which is unknown.
    #[error("{0} requires the token that ends a document: set eod")]
    NoEod(&'static str),
    /// A token exceeds the vocabulary.
    #[error(
        "sequence {sequence} of '{}' has the token {token}, but the vocabulary has {vocabulary}: it was made with another tokenizer",
        prefix.display()
    )]
    BeyondVocabulary {
        /// The prefix of the files.
        prefix: PathBuf,
        /// The sequence.
        sequence: usize,
        /// The token.
        token: i32,
        /// The size of the vocabulary.
        vocabulary: usize,
    },
    /// A value of a cached index is out of range.
    #[error("the indices of '{}' do not match it: {what} {found} is out of range, expected below {len}", prefix.display())]
    ForeignIndex {
        /// The prefix of the files.
        prefix: PathBuf,
        /// The kind of value.
        what: &'static str,
        /// The value.
        found: i64,
        /// The upper bound.
        len: usize,
    },
    /// Invalid blend weights.
    #[error(
        "invalid blend weights {0:?}: expected one weight of at least 0 per file and at least one above 0, or no \
         weights"
    )]
    Weights(Vec<f64>),
    /// Some files have a weight and others do not.
    #[error("{with} of {files} files have a weight: give one to all of them or to none")]
    SomeWeights {
        /// The number of files with a weight.
        with: usize,
        /// The number of files.
        files: usize,
    },
    /// The number of files cannot be blended.
    #[error("cannot blend {0} files: expected 1 to {max}", max = i16::MAX)]
    Files(usize),
    /// The blend needs more samples of a data set than it has.
    #[error("the blend takes {taken} samples from data set {number}, which has {samples}")]
    Oversampled {
        /// The data set, from 0.
        number: usize,
        /// The samples that the blend takes.
        taken: u64,
        /// The samples that it has.
        samples: u64,
    },
    /// The files have too few samples: without weights, each sample is used once.
    #[error(
        "the files have {samples} samples of {seq} tokens, and the run needs {wanted}: without weights each sample is \
         used once; give weights, or train for fewer steps"
    )]
    Exhausted {
        /// The samples of all files.
        samples: u64,
        /// Tokens per sample.
        seq: usize,
        /// The samples that the run needs.
        wanted: u64,
    },
    /// The data sets have different sample lengths.
    #[error("data set {number} has samples of {found} tokens, and the first has {seq}")]
    UnequalLengths {
        /// The data set, from 0.
        number: usize,
        /// The number of tokens per sample of this data set.
        found: usize,
        /// The tokens per sample of the first data set.
        seq: usize,
    },
    /// The size of the vocabulary is unknown.
    #[error("unknown vocabulary of '{}': no '{}' gives it; set its size", prefix.display(), sidecar.display())]
    NoVocabulary {
        /// The prefix of the files.
        prefix: PathBuf,
        /// The sidecar file that was looked for.
        sidecar: PathBuf,
    },
    /// Two sidecars contradict each other.
    #[error("'{}' and '{}' disagree on {what}: {first} and {second}", prefix.display(), other.display())]
    Disagree {
        /// The prefix of the first files.
        prefix: PathBuf,
        /// The prefix of the second files.
        other: PathBuf,
        /// The property.
        what: &'static str,
        /// The value in the first sidecar.
        first: String,
        /// The value in the second sidecar.
        second: String,
    },
    /// A sidecar cannot be read.
    #[error(transparent)]
    Info(#[from] TokenFileInfoError),
    /// A sidecar has an invalid end-of-document token.
    #[error("the eod in the sidecar of '{}' is not a token: tokens are below 2^31", .0.display())]
    Eod(PathBuf),
    /// The options exclude each other.
    #[error("{0} has no effect with {1}: leave one out")]
    Ignored(&'static str, &'static str),
}

/// An error of the index cache.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// A file system operation failed.
    #[error("cannot {what} '{}': {source}", path.display())]
    Io {
        /// The operation.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Timed out waiting for another process that builds the same indices.
    #[error(
        "timed out after {} s waiting for indices that another process builds; '{}' is held by {holder}", waited.as_secs(), lock.display()
    )]
    LockTimeout {
        /// The lock file.
        lock: PathBuf,
        /// The process that holds it.
        holder: String,
        /// The time waited.
        waited: Duration,
    },
}

/// Returns a remedy for a part with too few tokens. In most files, a sequence is a document.
fn remedy(sequences: usize, all_sequences: usize) -> String {
    match (sequences, all_sequences) {
        (0, 1) => {
            "there is 1 document, and a split never divides a document: preprocess with --lines or --separator, or \
             hold nothing out with the split 100,0,0"
                .into()
        }
        (0, all) => format!(
            "there are {all} documents, and a split never divides a document: give more documents, another split, or \
             preprocess with --lines or --separator"
        ),
        _ => "give more text, another split, or shorter sequences".into(),
    }
}
