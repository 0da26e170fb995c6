//! What a run is trained on, wherever its tokens come from.

use std::sync::Arc;

use super::{Batch, DataError};

/// A sequence of tokens and, for each token, the one that follows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// What the model reads: `[seq]`.
    pub tokens: Vec<i32>,
    /// What it shall predict, `tokens` shifted by one: `[seq]`. [`IGNORE`](super::IGNORE) has no loss.
    pub targets: Vec<i32>,
    /// Where documents begin that see nothing of those before, and whose positions begin at 0 again:
    /// rising places in the sequence, the first of them 0. Empty where the sequence is one piece.
    pub documents: Vec<usize>,
}

/// The training samples of a run, in their order.
///
/// A sample is known by its number, counted from the first sample of the run over all steps and ranks.
/// So it is the same under every layout, and after every restart.
pub trait Samples: Send + Sync {
    /// The number of tokens in a sample.
    fn seq(&self) -> usize;

    /// The sample of this number.
    ///
    /// # Errors
    ///
    /// [`DataError`] where there is no such sample, or it cannot be read.
    fn sample(&self, number: u64) -> Result<Sample, DataError>;

    /// The samples of these numbers as rows, in order.
    ///
    /// # Errors
    ///
    /// [`DataError::NoRows`] if there are none; see [`sample`](Self::sample).
    fn batch(&self, numbers: std::ops::Range<u64>) -> Result<Batch, DataError> {
        let samples = numbers.map(|number| self.sample(number));
        Batch::new(samples.collect::<Result<Vec<_>, _>>()?)
    }
}

/// How samples are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sampling {
    /// Tokens of a sample.
    pub seq: usize,
    /// Chooses which samples come when.
    pub seed: u64,
    /// How many samples the run needs in all.
    pub samples: u64,
}

/// Tokens to train on, and others to evaluate on.
pub trait Dataset: Send + Sync {
    /// What it is, in one line for people.
    fn describe(&self) -> String;

    /// Equal on ranks that read the same, wherever it lies; differs where the data does.
    fn fingerprint(&self) -> u64;

    /// Tokens are below this.
    fn vocabulary(&self) -> usize;

    /// Bytes of text that a token stands for, on average; 1 where it is not known.
    fn bytes_per_token(&self) -> f64 {
        1.0
    }

    /// The samples of a run. Ranks of one process may share what this gives.
    ///
    /// # Errors
    ///
    /// [`DataError`] for a length that does not fit, and for what cannot be read.
    fn training(&self, sampling: &Sampling) -> Result<Arc<dyn Samples>, DataError>;

    /// At most `max` samples of `seq` tokens to evaluate on, always the same ones.
    ///
    /// # Errors
    ///
    /// See [`training`](Self::training).
    fn held_out(&self, seq: usize, max: usize) -> Result<Vec<Sample>, DataError>;
}
