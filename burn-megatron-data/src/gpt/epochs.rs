//! Computes the number of epochs over a part.

use super::SamplingError;

/// The last epoch is shuffled separately if less than this share of the epoch is used.
const LAST_EPOCH_SHARE: f64 = 0.8;

/// The number of epochs over a part of the data, and their tokens and samples. Each epoch uses every token once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Epochs {
    /// The number of epochs.
    pub count: u64,
    /// The number of tokens per epoch.
    pub tokens: u64,
    /// The total number of samples of all epochs, which is at least the requested number.
    pub samples: u64,
    /// The number of samples before the last epoch, if the last epoch is shuffled separately. This is the case if less
    /// than 80 % of the last epoch is used. If it were shuffled together with the other epochs, its early tokens would
    /// be used more often.
    pub before_last: Option<u64>,
}

impl Epochs {
    /// Computes the smallest number of epochs of `tokens` tokens that contain `wanted` samples of `seq` tokens, plus
    /// `extra` tokens at the end. If `wanted` is `None`, the number of epochs is 1. The remaining tokens are dropped,
    /// or become an additional padded sample.
    ///
    /// # Errors
    ///
    /// [`SamplingError::TooLarge`] if the tokens of all epochs overflow 63 bits.
    pub fn new(
        tokens: u64,
        seq: usize,
        extra: usize,
        wanted: Option<u64>,
        drop_last: bool,
    ) -> Result<Self, SamplingError> {
        let (seq, extra) = (seq as u64, extra as u64);
        let needed = wanted.map_or(Some(0), |samples| {
            samples.checked_mul(seq)?.checked_add(extra)
        });
        let count = needed.map(|needed| needed.div_ceil(tokens).max(1));
        let all = count.and_then(|count| count.checked_mul(tokens));
        let (Some(count), Some(all)) = (count, all.filter(|all| *all <= i64::MAX as u64)) else {
            let samples = wanted.unwrap_or(0);
            return Err(SamplingError::TooLarge { samples, seq });
        };
        let samples = if drop_last {
            all.saturating_sub(extra) / seq
        } else {
            all.saturating_sub(extra).div_ceil(seq)
        };
        Ok(Self {
            count,
            tokens,
            samples,
            before_last: Self::before_last(count, tokens, seq, extra, wanted),
        })
    }

    fn before_last(
        count: u64,
        tokens: u64,
        seq: u64,
        extra: u64,
        wanted: Option<u64>,
    ) -> Option<u64> {
        let wanted = wanted.filter(|_| count > 1)?;
        let before = ((count - 1) * tokens - extra) / seq;
        let of_one = tokens.saturating_sub(extra) / seq;
        let enough = (LAST_EPOCH_SHARE * of_one as f64) as u64;
        (wanted - before < enough).then_some(before)
    }
}
