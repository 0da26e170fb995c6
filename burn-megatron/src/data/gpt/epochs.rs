//! How often a part is gone through.

use super::SamplingError;

/// Of the samples of an epoch the last one must give at least this share to be shuffled with the others.
const LAST_EPOCH_SHARE: f64 = 0.8;

/// The epochs of a part, in which every token comes once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Epochs {
    /// The number of epochs.
    pub count: u64,
    /// Tokens of one.
    pub tokens: u64,
    /// Samples of all epochs: as many as were asked for, or more.
    pub samples: u64,
    /// The samples before the last epoch, where that is shuffled by itself: it is used for less than 80 %,
    /// so shuffling it with the others would favour those of its tokens that come early.
    pub before_last: Option<u64>,
}

impl Epochs {
    /// The least number of epochs of `tokens` tokens that has `wanted` samples of `seq` tokens and `extra`
    /// more at the end; one epoch where no number is asked for. What is left over is dropped, or else is one
    /// more sample, which is filled up.
    ///
    /// # Errors
    ///
    /// [`SamplingError::TooLarge`] if the tokens of all epochs are beyond 63 bits.
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
        let samples = match drop_last {
            true => all.saturating_sub(extra) / seq,
            false => all.saturating_sub(extra).div_ceil(seq),
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
