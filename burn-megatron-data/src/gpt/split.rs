//! The split of the sequences into training, validation and test parts.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use super::SamplingError;

/// A part of a data set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SplitPart {
    /// The training part.
    Train,
    /// The validation part, for evaluation during training.
    Valid,
    /// The test part, for evaluation at the end.
    Test,
}

impl fmt::Display for SplitPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Train => "train",
            Self::Valid => "valid",
            Self::Test => "test",
        })
    }
}

/// The split of a file into training, validation and test parts. The parts are consecutive ranges of the sequences of
/// the file.
///
/// ```
/// use burn_megatron_data::gpt::{SplitPart, Split};
///
/// let split: Split = "969,30,1".parse()?;
/// assert_eq!(split.range(SplitPart::Valid, 2000), Some(1938..1998));
/// # Ok::<(), burn_megatron_data::gpt::SamplingError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Split {
    /// The shares as given.
    shares: [f64; 3],
    /// The bounds of the parts, from 0 to 1.
    bounds: [f64; 4],
}

impl Split {
    /// Creates a split from the shares of the training, validation and test parts. The shares are normalized.
    ///
    /// # Errors
    ///
    /// [`SamplingError::Split`] for a negative or non-finite share, or if all shares are 0.
    pub fn new(shares: [f64; 3]) -> Result<Self, SamplingError> {
        let sum = shares[0] + shares[1] + shares[2];
        let fits = |share: &f64| share.is_finite() && *share >= 0.0;
        if !shares.iter().all(fits) || !sum.is_finite() || sum <= 0.0 {
            let text = shares.map(|share| share.to_string()).join(",");
            return Err(SamplingError::Split(text));
        }
        let [train, valid, test] = shares.map(|share| share / sum);
        let bounds = [0.0, train, train + valid, train + valid + test];
        Ok(Self { shares, bounds })
    }

    /// Returns the range of the sequences in a part. `sequences` is the total number of sequences. Returns `None` if
    /// the share of the part is 0. The bounds of the range are rounded half to even.
    pub fn range(&self, part: SplitPart, sequences: usize) -> Option<Range<usize>> {
        let (start, end) = (self.bounds[part as usize], self.bounds[part as usize + 1]);
        let rounded = |bound: f64| (bound * sequences as f64).round_ties_even() as usize;
        (end > start).then(|| rounded(start)..rounded(end).min(sequences))
    }
}

impl Split {
    /// Returns whether the shares of the validation and the test part are both 0.
    pub fn is_training_only(&self) -> bool {
        let rest = [SplitPart::Valid, SplitPart::Test];
        rest.iter().all(|part| self.range(*part, 0).is_none())
    }
}

/// Parses a split from comma-separated shares, such as `969,30,1`. Missing shares are 0.
impl FromStr for Split {
    type Err = SamplingError;

    fn from_str(text: &str) -> Result<Self, SamplingError> {
        let refused = || SamplingError::Split(text.to_string());
        let mut shares = [0.0; 3];
        for (number, share) in text.split(',').enumerate() {
            let share = share.trim().parse().map_err(|_| refused())?;
            *shares.get_mut(number).ok_or_else(refused)? = share;
        }
        Self::new(shares).map_err(|_| refused())
    }
}

impl fmt::Display for Split {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [train, valid, test] = self.shares;
        write!(f, "{train},{valid},{test}")
    }
}

/// The default of Megatron: the shares of training, validation and test are 969, 30 and 1.
impl Default for Split {
    fn default() -> Self {
        let bounds = [0.0, 0.969, 0.969 + 0.03, 0.969 + 0.03 + 0.001];
        let shares = [969.0, 30.0, 1.0];
        Self { shares, bounds }
    }
}
