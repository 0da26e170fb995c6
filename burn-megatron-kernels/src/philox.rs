//! A counter-based random number generator: Philox 4x32 with 10 rounds (Salmon et al., "Parallel random numbers: as
//! easy as 1, 2, 3", SC 2011).
//!
//! A random number is a pure function of a key and a counter. It does not depend on the order in which numbers are
//! drawn, or on the sharding of a tensor.

use std::f64::consts::TAU;

/// The multipliers of a round. They are also used by code that computes many blocks at once.
pub(crate) const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
/// The increments of the key between rounds: fractions of the golden ratio and of the square root of 3.
pub(crate) const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
/// The number of rounds per block of four random words.
pub(crate) const ROUNDS: usize = 10;

/// Computes one block of four random 32-bit words from a key and a counter.
pub fn block(key: [u32; 2], counter: [u32; 4]) -> [u32; 4] {
    let (mut key, mut x) = (key, counter);
    for _ in 0..ROUNDS {
        let (high0, low0) = multiply(MULTIPLIERS[0], x[0]);
        let (high1, low1) = multiply(MULTIPLIERS[1], x[2]);
        x = [high1 ^ x[1] ^ key[0], low1, high0 ^ x[3] ^ key[1], low0];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    x
}

fn multiply(a: u32, b: u32) -> (u32, u32) {
    let product = u64::from(a) * u64::from(b);
    ((product >> 32) as u32, product as u32)
}

/// A stream of random numbers, defined by a 64-bit key and a 64-bit position. The position is the fixed half of the
/// Philox counter.
///
/// Random number `i` of a stream is word `i % 4` of block `i / 4`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    key: [u32; 2],
    high: [u32; 2],
}

impl Stream {
    /// Creates the stream of `key` at `position`, such as a step or a sample index.
    pub fn new(key: u64, position: u64) -> Self {
        Self {
            key: words(key),
            high: words(position),
        }
    }

    /// Calls `draw(i, word)` for each random word with an index in `start..start + len`. `i` is the index minus
    /// `start`.
    pub fn words(&self, start: u64, len: usize, draw: impl FnMut(usize, u32)) {
        self.draws(start, len, |block| block, draw);
    }

    /// Calls `draw(i, value)` for each standard normal random number with an index in `start..start + len`. `i` is the
    /// index minus `start`. The numbers are computed by the Box-Muller transform.
    ///
    /// The transform converts two random words to two normal numbers, with the indices `2j` (cosine) and `2j + 1`
    /// (sine).
    pub fn normals(&self, start: u64, len: usize, draw: impl FnMut(usize, f64)) {
        self.draws(start, len, normals, draw);
    }

    /// Calls `draw` with the values that `of_block` computes from the words of each block.
    fn draws<T: Copy>(
        &self,
        start: u64,
        len: usize,
        of_block: impl Fn([u32; 4]) -> [T; 4],
        mut draw: impl FnMut(usize, T),
    ) {
        let mut done = 0;
        while done < len {
            let at = start + done as u64;
            let values = of_block(self.block(at / 4));
            let first = (at % 4) as usize;
            let count = (4 - first).min(len - done);
            for (i, value) in values[first..first + count].iter().enumerate() {
                draw(done + i, *value);
            }
            done += count;
        }
    }

    fn block(&self, index: u64) -> [u32; 4] {
        let low = words(index);
        block(self.key, [low[0], low[1], self.high[0], self.high[1]])
    }
}

/// Maps a random word to a number in the open interval (0, 1). If the interval is divided into 2^32 cells of equal
/// size, the result is the center of the cell with index `word`.
pub fn uniform(word: u32) -> f64 {
    (f64::from(word) + 0.5) / 4_294_967_296.0
}

fn normals(words: [u32; 4]) -> [f64; 4] {
    let pair = |a: u32, b: u32| {
        let radius = (-2.0 * uniform(a).ln()).sqrt();
        let (sine, cosine) = (TAU * uniform(b)).sin_cos();
        [radius * cosine, radius * sine]
    };
    let ([a, b], [c, d]) = (pair(words[0], words[1]), pair(words[2], words[3]));
    [a, b, c, d]
}

fn words(value: u64) -> [u32; 2] {
    [value as u32, (value >> 32) as u32]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers published with the reference implementation (Random123).
    #[test]
    fn known_answers() {
        let zero = block([0; 2], [0; 4]);
        assert_eq!(zero, [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        let ones = block([u32::MAX; 2], [u32::MAX; 4]);
        assert_eq!(ones, [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        let pi = block(
            [0xa409_3822, 0x299f_31d0],
            [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
        );
        assert_eq!(pi, [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
    }

    #[test]
    fn a_draw_does_not_depend_on_where_reading_starts() {
        let stream = Stream::new(7, 3);
        let mut all = [0; 40];
        stream.words(0, 40, |i, word| all[i] = word);
        for start in 0..20 {
            for len in [0, 1, 3, 4, 9, 20] {
                stream.words(start, len, |i, word| {
                    assert_eq!(word, all[start as usize + i])
                });
            }
        }
        let mut normal = [0.0; 40];
        stream.normals(0, 40, |i, value| normal[i] = value);
        stream.normals(13, 9, |i, value| assert_eq!(value, normal[13 + i]));
    }

    #[test]
    fn keys_and_positions_give_other_draws() {
        let first = |key, position| {
            let mut word = 0;
            Stream::new(key, position).words(0, 1, |_, w| word = w);
            word
        };
        assert_ne!(first(0, 0), first(1, 0));
        assert_ne!(first(0, 0), first(1 << 32, 0));
        assert_ne!(first(0, 0), first(0, 1));
        assert_ne!(first(0, 0), first(0, 1 << 32));
    }

    /// The mean, the variance and the kurtosis of a normal distribution, within five standard errors.
    #[test]
    fn normals_have_the_moments_of_a_normal() {
        let n = 100_000;
        let (mut first, mut second, mut fourth) = (0.0, 0.0, 0.0);
        Stream::new(42, 0).normals(0, n, |_, x| {
            first += x;
            second += x * x;
            fourth += x.powi(4);
        });
        let n = n as f64;
        assert!((first / n).abs() < 5.0 / n.sqrt());
        assert!((second / n - 1.0).abs() < 5.0 * (2.0 / n).sqrt());
        assert!((fourth / n - 3.0).abs() < 5.0 * (96.0 / n).sqrt());
    }
}
