//! What can be wrong with the way samples are taken.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use super::Part;
use crate::tokenizer::InfoError;

/// Why there are no such samples.
#[derive(Debug, thiserror::Error)]
pub enum SamplingError {
    /// Not the shares of three parts.
    #[error(
        "a split of '{0}' is none: give up to three shares of training, validation and test, as 969,30,1"
    )]
    Split(String),
    /// A seed that NumPy's generator does not take.
    #[error("a seed of {0} is too large for token files: at most {max}", max = u32::MAX)]
    Seed(u64),
    /// The part has too few tokens.
    #[error(
        "the {part} part of '{}' has {tokens} tokens in {sequences} sequences, but a sample of {seq} tokens needs {needed}: give more text, another split, or shorter sequences",
        prefix.display()
    )]
    TooFewTokens {
        /// The files.
        prefix: PathBuf,
        /// The part.
        part: Part,
        /// Its tokens.
        tokens: u64,
        /// Its sequences.
        sequences: usize,
        /// Tokens of a sample.
        seq: usize,
        /// Tokens that one sample takes.
        needed: usize,
    },
    /// The part has no share.
    #[error("the split {split} has no {part} part")]
    NoPart {
        /// The split.
        split: String,
        /// The part.
        part: Part,
    },
    /// More tokens than 63 bits count.
    #[error("{samples} samples of {seq} tokens are more tokens than 63 bits count")]
    TooLarge {
        /// Samples that were asked for.
        samples: u64,
        /// Tokens of each.
        seq: u64,
    },
    /// More sequences than the format of the document index allows.
    #[error("{sequences} sequences are too many for a document index: at most {max} in a file", max = i32::MAX)]
    TooManySequences {
        /// The number of sequences.
        sequences: usize,
    },
    /// A sample past the last one.
    #[error("there is no sample {number}: there are {samples}")]
    NoSuchSample {
        /// The sample, counted from 0.
        number: u64,
        /// How many there are.
        samples: u64,
    },
    /// An option that is about the end of documents, and nobody said which token that is.
    #[error("{0} needs the token that ends a document: give eod")]
    NoEod(&'static str),
    /// A token that the model has no row for.
    #[error(
        "sequence {sequence} of '{}' has the token {token}, but the vocabulary has {vocabulary}: it was made with another tokenizer",
        prefix.display()
    )]
    BeyondVocabulary {
        /// The files.
        prefix: PathBuf,
        /// The sequence.
        sequence: usize,
        /// Its token.
        token: i32,
        /// Tokens are below this.
        vocabulary: usize,
    },
    /// A number in a cached index that points nowhere.
    #[error("the indices of '{}' do not fit it: {what} {found} is beyond {len}", prefix.display())]
    ForeignIndex {
        /// The files.
        prefix: PathBuf,
        /// Which index.
        what: &'static str,
        /// What stands there.
        found: i64,
        /// What it must be below.
        len: usize,
    },
    /// Weights that say nothing.
    #[error(
        "weights of {0:?} do not blend: give one to each file, none below 0 and one at least above, or none at all"
    )]
    Weights(Vec<f64>),
    /// Some files have a weight and others none.
    #[error("{with} of {files} files have a weight: give one to all of them or to none")]
    SomeWeights {
        /// Files with a weight.
        with: usize,
        /// All files.
        files: usize,
    },
    /// No file, or more than a blend can number.
    #[error("{0} files do not blend: give 1 to {max}", max = i16::MAX)]
    Files(usize),
    /// The blend takes more from a data set than it has.
    #[error("the blend takes {taken} samples from data set {number}, which has {samples}")]
    Oversampled {
        /// The data set, counted from 0.
        number: usize,
        /// What is taken.
        taken: u64,
        /// What it has.
        samples: u64,
    },
    /// Without weights every sample comes once, and that is too few.
    #[error(
        "the files have {samples} samples of {seq} tokens, and the run needs {wanted}: without weights each comes once; give weights, or make fewer steps"
    )]
    Exhausted {
        /// Samples they have.
        samples: u64,
        /// Tokens of each.
        seq: usize,
        /// Samples that the run needs.
        wanted: u64,
    },
    /// Data sets of different sample lengths.
    #[error("data set {number} has samples of {found} tokens, and the first has {seq}")]
    UnequalLengths {
        /// The data set, counted from 0.
        number: usize,
        /// Tokens of its samples.
        found: usize,
        /// Those of the first.
        seq: usize,
    },
    /// Nobody said how large the vocabulary is.
    #[error("no vocabulary is known for '{}': there is no '{}' that names it; give its size", prefix.display(), sidecar.display())]
    NoVocabulary {
        /// The files.
        prefix: PathBuf,
        /// What is written beside token files.
        sidecar: PathBuf,
    },
    /// Files that were made with different tokenizers.
    #[error("'{}' and '{}' disagree on {what}: {first} and {second}", prefix.display(), other.display())]
    Disagree {
        /// The first of the files.
        prefix: PathBuf,
        /// The other one.
        other: PathBuf,
        /// What about.
        what: &'static str,
        /// What the first says.
        first: String,
        /// What the other says.
        second: String,
    },
    /// What stands beside the token files is not readable.
    #[error(transparent)]
    Info(#[from] InfoError),
    /// What stands beside the token files names a token that none of them can hold.
    #[error("the eod that stands beside '{}' is no token: tokens are below 2^31", .0.display())]
    Eod(PathBuf),
    /// Settings that exclude one another.
    #[error("{0} has no effect with {1}: leave one out")]
    Ignored(&'static str, &'static str),
}

/// Why indices cannot be kept.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// The operating system refused.
    #[error("cannot {what} '{}': {source}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// With which file.
        path: PathBuf,
        /// The reason that the operating system gives.
        source: io::Error,
    },
    /// Another process builds the same, and takes too long.
    #[error(
        "waited {} s for the indices that another process builds; '{}' is held by {holder}", waited.as_secs(), lock.display()
    )]
    Held {
        /// What it holds.
        lock: PathBuf,
        /// Who it is.
        holder: String,
        /// How long.
        waited: Duration,
    },
}
