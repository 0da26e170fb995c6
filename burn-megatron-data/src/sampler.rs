//! Samples training windows of a text at pseudorandom positions, which are computed by hashing a counter.

use std::sync::Arc;

use super::text::{split_at_documents, window};
use super::{DataError, Sample, Samples};

/// Training samples of a text: windows of consecutive tokens, which are drawn with replacement.
///
/// The window of a sample depends only on the text, the sequence length, the seed and the sample number. A window may
/// contain the end of a document, which is a zero byte.
///
/// Clones share the text.
#[derive(Clone)]
pub struct TextSamples {
    text: Arc<[u8]>,
    seq: usize,
    seed: u64,
    documents: bool,
}

impl TextSamples {
    /// Creates samples of a text, which must be longer than `seq`; [`super::TextData::samples`] checks it.
    pub(super) fn new(text: Arc<[u8]>, seq: usize, seed: u64) -> Self {
        Self {
            text,
            seq,
            seed,
            documents: false,
        }
    }

    /// Sets whether samples contain the starts of their documents.
    pub(super) fn with_documents(self, documents: bool) -> Self {
        Self { documents, ..self }
    }

    /// Returns the number of possible start positions of a window. All start positions have the same probability, up to
    /// a difference of 2^-64.
    pub fn starts(&self) -> usize {
        self.text.len() - self.seq
    }

    /// Returns the start position of the window of a sample.
    pub fn start(&self, sample: u64) -> usize {
        start_of(self.seed, sample, self.starts())
    }
}

/// Returns the position in `0..starts` where the window of a sample starts.
pub(super) fn start_of(seed: u64, sample: u64, starts: usize) -> usize {
    // The high word of hash * starts is in 0..starts: a 64-bit fraction of the range, without a modulo.
    let hash = counter_hash(seed, sample);
    ((u128::from(hash) * starts as u128) >> 64) as usize
}

impl Samples for TextSamples {
    fn seq(&self) -> usize {
        self.seq
    }

    fn sample(&self, number: u64) -> Result<Sample, DataError> {
        let mut sample = window(&self.text, self.start(number), self.seq);
        if self.documents {
            split_at_documents(&mut sample);
        }
        Ok(sample)
    }
}

/// Returns a hash of two counters that is not symmetric in them.
fn counter_hash(seed: u64, sample: u64) -> u64 {
    mix(mix(seed) ^ sample)
}

/// Returns one output of the SplitMix64 generator for state `x`: a bijection in which every input bit affects every
/// output bit (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
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
        // The first outputs for seed 1234567; the state advances by the golden-ratio constant.
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
    fn both_counters_matter_and_so_does_their_place() {
        let mut seen: Vec<u64> = (0..32)
            .flat_map(|seed| (0..32).map(move |sample| counter_hash(seed, sample)))
            .collect();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 32 * 32);
    }
}
