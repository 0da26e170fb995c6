//! The traits of training and evaluation data.

use std::sync::Arc;

use super::{Batch, DataError};

/// A sequence of tokens with the next token of each as its target.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// Input tokens: `[seq]`.
    pub tokens: Vec<i32>,
    /// Targets, `tokens` shifted by one: `[seq]`. The loss ignores [`IGNORE`](super::IGNORE).
    pub targets: Vec<i32>,
    /// The starts of the documents in the sequence, ascending from 0. Attention does not cross documents, and positions
    /// restart in each document. Empty if the sequence is one document.
    pub documents: Vec<usize>,
    /// The number of padding tokens at the end of the row. Their targets are ignored, and expert routers skip them.
    pub padding: usize,
}

/// The training samples of a run, in order.
///
/// A sample has a number, counted from the first sample of the run over all steps and ranks. The sample of a number is
/// the same in every layout and after every restart.
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
    /// [`DataError`] if there is no such sample, or it cannot be read.
    fn sample(&self, number: u64) -> Result<Sample, DataError>;

    /// Returns the samples with these numbers as the rows of a batch, in order.
    ///
    /// # Errors
    ///
    /// [`DataError::NoRows`] if the range is empty, and the errors of [`sample`](Self::sample).
    fn batch(&self, numbers: std::ops::Range<u64>) -> Result<Batch, DataError> {
        let samples = numbers.map(|number| self.sample(number));
        Batch::new(samples.collect::<Result<Vec<_>, _>>()?)
    }
}

/// Parameters of sampling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sampling {
    /// Tokens per sample.
    pub seq: usize,
    /// The seed of the order of samples.
    pub seed: u64,
    /// The total number of samples that the run needs.
    pub samples: u64,
}

/// A training set with a held-out part.
pub trait Dataset: Send + Sync {
    /// Returns a one-line description.
    fn describe(&self) -> String;

    /// Returns a hash of the content, independent of its path. It is equal on ranks that read the same data.
    fn fingerprint(&self) -> u64;

    /// Returns the vocabulary size: all tokens are below it.
    fn vocabulary(&self) -> usize;

    /// Returns the average number of bytes of text per token; 1 if unknown.
    fn bytes_per_token(&self) -> f64 {
        1.0
    }

    /// Returns the training samples of a run. The ranks of a process may share them.
    ///
    /// # Errors
    ///
    /// [`DataError`] for a sequence length that does not fit, and for failed reads.
    fn training(&self, sampling: &Sampling) -> Result<Arc<dyn Samples>, DataError>;

    /// Returns at most `max` samples of `seq` tokens for evaluation. The selection is always the same.
    ///
    /// # Errors
    ///
    /// See [`training`](Self::training).
    fn held_out(&self, seq: usize, max: usize) -> Result<Vec<Sample>, DataError>;
}
