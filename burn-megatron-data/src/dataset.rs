//! The traits of training and evaluation data.

use std::sync::Arc;

use super::{Batch, DataError};

/// A sample: a sequence of tokens. The target of each token is the next token.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// The input tokens: `[seq]`.
    pub tokens: Vec<i32>,
    /// The target of each token: `[seq]`. They are the tokens shifted by one. The loss ignores targets that are
    /// [`IGNORE`](super::IGNORE).
    pub targets: Vec<i32>,
    /// The starts of the documents in the sequence, in ascending order. The first start is 0. A token only attends to
    /// tokens of the same document, and positions restart in each document. Empty if the sequence is one document.
    pub documents: Vec<usize>,
    /// The number of padding tokens at the end of the sequence. Their targets are ignored, and expert routers skip
    /// them.
    pub padding: usize,
}

/// The training samples of a run, in order.
///
/// Samples are numbered from the start of the run, over all steps and ranks. The sample with a given number is the same
/// in every layout and after every restart.
///
/// ```
/// use burn_megatron_data::{DataError, Sample, Samples};
///
/// /// Rows of 4 tokens that count up from the number of the sample.
/// struct Counting;
///
/// impl Samples for Counting {
///     fn seq(&self) -> usize {
///         4
///     }
///
///     fn sample(&self, number: u64) -> Result<Sample, DataError> {
///         let first = number as i32;
///         Ok(Sample {
///             tokens: (first..first + 4).collect(),
///             targets: (first + 1..first + 5).collect(),
///             ..Sample::default()
///         })
///     }
/// }
///
/// let batch = Counting.batch(5..7)?;
/// assert_eq!(batch.tokens(), [5, 6, 7, 8, 6, 7, 8, 9]);
/// # Ok::<(), DataError>(())
/// ```
pub trait Samples: Send + Sync {
    /// Returns the number of tokens in a sample.
    fn seq(&self) -> usize;

    /// Returns the sample with this number.
    ///
    /// # Errors
    ///
    /// [`DataError`] if there is no sample with this number, or if it cannot be read.
    fn sample(&self, number: u64) -> Result<Sample, DataError>;

    /// Returns a batch whose rows are the samples with these numbers, in order.
    ///
    /// # Errors
    ///
    /// [`DataError::NoRows`] if the range is empty, and the errors of [`sample`](Self::sample).
    fn batch(&self, numbers: std::ops::Range<u64>) -> Result<Batch, DataError> {
        let samples = numbers.map(|number| self.sample(number));
        Batch::new(samples.collect::<Result<Vec<_>, _>>()?)
    }
}

/// The parameters with which a run samples its training data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sampling {
    /// The number of tokens per sample.
    pub seq: usize,
    /// The random seed for the order of samples.
    pub seed: u64,
    /// The total number of samples that the run needs.
    pub samples: u64,
}

/// A data set with training samples and held-out samples.
pub trait Dataset: Send + Sync {
    /// Returns a description of the data set in one line.
    fn describe(&self) -> String;

    /// Returns a hash of the content of the data set. It does not depend on the path, so it is equal on all ranks that
    /// read the same data.
    fn fingerprint(&self) -> u64;

    /// Returns the vocabulary size. All token ids are smaller than the vocabulary size.
    fn vocabulary(&self) -> usize;

    /// Returns the average number of bytes of text per token. It is 1 if the number is unknown.
    fn bytes_per_token(&self) -> f64 {
        1.0
    }

    /// Returns the training samples of a run. If several ranks run in one process, they may share the samples.
    ///
    /// # Errors
    ///
    /// [`DataError`] if the data is too short for the sequence length, or if it cannot be read.
    fn training(&self, sampling: &Sampling) -> Result<Arc<dyn Samples>, DataError>;

    /// Returns at most `max` held-out samples of `seq` tokens for evaluation. The same samples are always selected.
    ///
    /// # Errors
    ///
    /// The errors of [`training`](Self::training).
    fn held_out(&self, seq: usize, max: usize) -> Result<Vec<Sample>, DataError>;
}
