//! Errors of sampling from token files.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use super::SplitPart;
use crate::tokenizer::TokenFileInfoError;

/// An error that occurred while token files were sampled.
#[derive(Debug, thiserror::Error)]
pub enum SamplingError {
    /// The split into training, validation and test parts is invalid.
    #[error(
        "invalid split '{0}': expected up to three shares of training, validation and test, such as 969,30,1"
    )]
    Split(String),
    /// The seed exceeds the range of NumPy's generator.
    #[error("a seed of {0} is too large for token files: at most {max}", max = u32::MAX)]
    Seed(u64),
    /// A part of the data has too few tokens for one sample.
    #[error(
        "the {part} part of '{}' has {tokens} tokens in {sequences} sequences, but a sample of {seq} tokens needs {needed}: {}",
        prefix.display(), remedy(*sequences, *all_sequences)
    )]
    TooFewTokens {
        /// The path prefix of the token files.
        prefix: PathBuf,
        /// The part of the data.
        part: SplitPart,
        /// The number of tokens in the part.
        tokens: u64,
        /// The number of sequences in the part.
        sequences: usize,
        /// The number of sequences in the file.
        all_sequences: usize,
        /// The number of tokens per sample.
        seq: usize,
        /// The number of tokens that one sample needs.
        needed: usize,
    },
    /// The requested part has a share of 0 in the split.
    #[error("the split {split} has no {part} part")]
    NoPart {
        /// The split as text.
        split: String,
        /// The part of the data.
        part: SplitPart,
    },
    /// The total number of tokens overflows.
    #[error("{samples} samples of {seq} tokens overflow 63 bits")]
    TooLarge {
        /// The number of requested samples.
        samples: u64,
        /// The number of tokens per sample.
        seq: u64,
    },
    /// There are more sequences than a document index can address.
    #[error("{sequences} sequences are too many for a document index: at most {max} in a file", max = i32::MAX)]
    TooManySequences {
        /// The number of sequences.
        sequences: usize,
    },
    /// The sample index is out of range.
    #[error("invalid sample number {number}: expected a number below {samples}")]
    NoSuchSample {
        /// The index of the sample, counted from 0.
        number: u64,
        /// The number of samples.
        samples: u64,
    },
    /// An option requires an end-of-document token, but the token is unknown.
    #[error("{0} requires the token that ends a document: set eod")]
    NoEod(&'static str),
    /// A token id is not smaller than the vocabulary size.
    #[error(
        "sequence {sequence} of '{}' has the token {token}, but the vocabulary has {vocabulary} tokens: the file was \
         made with another tokenizer",
        prefix.display()
    )]
    BeyondVocabulary {
        /// The path prefix of the token files.
        prefix: PathBuf,
        /// The index of the sequence.
        sequence: usize,
        /// The token id.
        token: i32,
        /// The size of the vocabulary.
        vocabulary: usize,
    },
    /// A value in a cached index is out of range for the token files.
    #[error("the indices of '{}' do not match it: {what} {found} is out of range, expected below {len}", prefix.display())]
    ForeignIndex {
        /// The path prefix of the token files.
        prefix: PathBuf,
        /// The kind of value.
        what: &'static str,
        /// The value in the index.
        found: i64,
        /// The exclusive upper bound of valid values.
        len: usize,
    },
    /// The weights of a blend are invalid.
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
    /// The number of files is invalid for a blend.
    #[error("cannot blend {0} files: expected 1 to {max}", max = i16::MAX)]
    Files(usize),
    /// A blend needs more samples of a data set than the data set has.
    #[error("the blend takes {taken} samples from data set {number}, which has {samples}")]
    Oversampled {
        /// The index of the data set, counted from 0.
        number: usize,
        /// The number of samples that the blend takes from the data set.
        taken: u64,
        /// The number of samples that the data set has.
        samples: u64,
    },
    /// The files have too few samples for the run. Without weights, each sample is used only once.
    #[error(
        "the files have {samples} samples of {seq} tokens, and the run needs {wanted}: without weights each sample is \
         used once; give weights, or train for fewer steps"
    )]
    Exhausted {
        /// The total number of samples of all files.
        samples: u64,
        /// The number of tokens per sample.
        seq: usize,
        /// The number of samples that the run needs.
        wanted: u64,
    },
    /// The data sets have different sample lengths.
    #[error(
        "data set {number} has samples of {found} tokens, but the samples of the first data set have {seq}"
    )]
    UnequalLengths {
        /// The index of the data set, counted from 0.
        number: usize,
        /// The number of tokens per sample in this data set.
        found: usize,
        /// The number of tokens per sample in the first data set.
        seq: usize,
    },
    /// The vocabulary size of the token files is unknown.
    #[error(
        "unknown vocabulary size of '{}', because '{}' does not exist or has no size: set it",
        prefix.display(), sidecar.display()
    )]
    NoVocabulary {
        /// The path prefix of the token files.
        prefix: PathBuf,
        /// The path of the sidecar file that should contain the vocabulary size.
        sidecar: PathBuf,
    },
    /// Two sidecar files have different values for the same property.
    #[error("'{}' and '{}' disagree on {what}: {first} and {second}", prefix.display(), other.display())]
    Disagree {
        /// The prefix of the first files.
        prefix: PathBuf,
        /// The prefix of the second files.
        other: PathBuf,
        /// The name of the property.
        what: &'static str,
        /// The value in the first sidecar.
        first: String,
        /// The value in the second sidecar.
        second: String,
    },
    /// A sidecar file cannot be read.
    #[error(transparent)]
    Info(#[from] TokenFileInfoError),
    /// A sidecar file has an invalid end-of-document token.
    #[error("the eod in the sidecar of '{}' is not a token: tokens are below 2^31", .0.display())]
    Eod(PathBuf),
    /// An option was set that has no effect together with another option.
    #[error("{0} conflicts with {1}: remove one of them")]
    Ignored(&'static str, &'static str),
}

/// An error of the index cache.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// A file system operation failed.
    #[error("cannot {what} '{}': {source}", path.display())]
    Io {
        /// The operation that failed.
        what: &'static str,
        /// The path of the file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The wait for another process that builds the same indices has timed out.
    #[error(
        "timed out after {} s waiting for indices that another process builds; '{}' is held by {holder}", waited.as_secs(), lock.display()
    )]
    LockTimeout {
        /// The path of the lock file.
        lock: PathBuf,
        /// The process that holds the lock.
        holder: String,
        /// The time for which this process waited.
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
