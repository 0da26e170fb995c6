//! Training windows whose place in the text follows from counters alone.

use std::ops::Range;
use std::sync::Arc;

use super::{Batch, DataError, Window};

/// Cuts training windows out of a text, with replacement.
///
/// The window of sample `i` of step `s` is a pure function of the text, the sequence length and
/// `(seed, s, i)`. Number samples over the whole global batch, and a sample is the same whichever
/// rank and micro-batch it falls to, and whether or not the run was interrupted before. A window
/// may run across the end of a document, which the model sees as a zero byte.
///
/// A clone shares the text.
#[derive(Clone)]
pub struct Sampler {
    text: Arc<[u8]>,
    seq: usize,
    seed: u64,
}

impl Sampler {
    /// `text` must be longer than `seq`; [`super::TextData::sampler`] sees to it.
    pub(super) fn new(text: Arc<[u8]>, seq: usize, seed: u64) -> Self {
        Self { text, seq, seed }
    }

    /// The number of tokens in a window.
    pub fn seq(&self) -> usize {
        self.seq
    }

    /// The number of places a window can start at; each is equally likely to within 2^-64 of the
    /// whole.
    pub fn starts(&self) -> usize {
        self.text.len() - self.seq
    }

    /// The window of `sample` (its number in the global batch) of `step`.
    pub fn window(&self, step: usize, sample: usize) -> Window<'_> {
        Window::at(&self.text, self.start(step, sample), self.seq)
    }

    /// The windows of the samples `samples` of `step` as rows, in order.
    ///
    /// # Errors
    ///
    /// [`DataError::NoRows`] if `samples` is empty.
    pub fn batch(&self, step: usize, samples: Range<usize>) -> Result<Batch, DataError> {
        Batch::new(samples.map(|sample| self.window(step, sample)))
    }

    fn start(&self, step: usize, sample: usize) -> usize {
        // The high word of hash * starts lies in 0..starts: a 64-bit fraction of the range, no
        // modulo.
        let hash = counter_hash(self.seed, step as u64, sample as u64);
        ((u128::from(hash) * self.starts() as u128) >> 64) as usize
    }
}

/// A hash of three counters, mixed one after the other so that exchanging two of them matters.
fn counter_hash(seed: u64, step: u64, sample: u64) -> u64 {
    [seed, step, sample]
        .into_iter()
        .fold(0, |hash, counter| mix(hash ^ counter))
}

/// One output of the SplitMix64 generator for state `x` (Steele, Lea and Flood, "Fast splittable
/// pseudorandom number generators", OOPSLA 2014): a bijection in which every input bit reaches
/// every output bit.
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::{counter_hash, mix};

    #[test]
    fn mixing_gives_the_published_sequence_of_splitmix64() {
        // The first outputs for seed 1234567; the state grows by the golden-ratio constant.
        let golden = 0x9e37_79b9_7f4a_7c15_u64;
        let outputs = [0, 1, 2].map(|i| mix(golden.wrapping_mul(i).wrapping_add(1_234_567)));
        let published = [
            6_457_827_717_110_365_317,
            3_203_168_211_198_807_973,
            9_817_491_932_198_370_423,
        ];
        assert_eq!(outputs, published);
    }

    #[test]
    fn every_counter_matters_and_so_does_its_place() {
        let mut seen: Vec<u64> = (0..8)
            .flat_map(|seed| (0..8).flat_map(move |step| (0..8).map(move |i| (seed, step, i))))
            .map(|(seed, step, i)| counter_hash(seed, step, i))
            .collect();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 8 * 8 * 8);
    }
}
