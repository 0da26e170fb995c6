//! Dropout masks on the CPU. Several Philox blocks are computed at once.

use super::DropoutMask;
use crate::cpu::Real;
use crate::philox::{MULTIPLIERS, ROUNDS, WEYL, block};

/// The number of blocks that are computed at once. Each word of these blocks takes two registers of AVX-512, or four
/// registers of AVX2.
const BLOCKS: usize = 16;
/// The number of words in these blocks.
const WORDS: usize = 4 * BLOCKS;
/// The number of elements below which computing single blocks is less work.
const MIN_BATCHED_DRAWS: usize = WORDS / 4;

impl DropoutMask {
    /// Multiplies `values`, which are the elements `start..` of the tensor, by the mask.
    #[inline(always)]
    pub(super) fn multiply<W: Real>(&self, start: usize, values: &mut [W]) {
        let mut done = 0;
        while done < values.len() {
            let element = start + done;
            let count = (self.run - element % self.run).min(values.len() - done);
            self.multiply_run(self.draw(element), &mut values[done..done + count]);
            done += count;
        }
    }

    /// Multiplies `values` by the factors of consecutive random numbers, starting at index `draw`.
    #[inline(always)]
    fn multiply_run<W: Real>(&self, mut draw: u64, mut values: &mut [W]) {
        while !values.is_empty() {
            let offset = (draw % 4) as usize;
            let count;
            if values.len() < MIN_BATCHED_DRAWS {
                count = (4 - offset).min(values.len());
                let words = block(self.key, self.counter(draw / 4));
                let factors = words.map(self.factor::<W>());
                scale(&mut values[..count], &factors[offset..]);
            } else {
                count = (WORDS - offset).min(values.len());
                let factors = self.factors::<W>(draw / 4);
                scale(&mut values[..count], &factors[offset..]);
            }
            draw += count as u64;
            values = &mut std::mem::take(&mut values)[count..];
        }
    }

    #[inline(always)]
    fn counter(&self, index: u64) -> [u32; 4] {
        [
            index as u32,
            (index >> 32) as u32,
            self.position[0],
            self.position[1],
        ]
    }

    /// Returns a function that maps a random word to its factor.
    ///
    /// All numbers are loaded before the words are read. The selection between two numbers in registers then needs no
    /// branch. A branch would be mispredicted for every dropped element.
    #[inline(always)]
    fn factor<W: Real>(&self) -> impl Fn(u32) -> W {
        let (threshold, kept) = (self.threshold, W::of(f64::from(self.scale)));
        #[inline(always)]
        move |word| if word < threshold { kept } else { W::ZERO }
    }

    /// Returns the factors of the random numbers in [`BLOCKS`] blocks, starting at block `first`.
    #[inline(always)]
    fn factors<W: Real>(&self, first: u64) -> [W; WORDS] {
        let (blocks, factor) = (self.blocks(first), self.factor());
        let mut factors = [W::ZERO; WORDS];
        for (to, word) in factors.iter_mut().zip(blocks.as_flattened()) {
            *to = factor(*word);
        }
        factors
    }

    /// Computes [`block`] for [`BLOCKS`] indices, starting at `first`.
    ///
    /// A word is in the lower half of a 64-bit lane, so that the lane can hold the product of two words. Vectors of
    /// 32-bit lanes would have to be split and joined for each product. The upper half of a lane is ignored.
    #[inline(always)]
    fn blocks(&self, first: u64) -> [[u32; 4]; BLOCKS] {
        // Blocks after the last block are computed but never used.
        let mut a: [u64; BLOCKS] = std::array::from_fn(|lane| first.wrapping_add(lane as u64));
        let mut b = a.map(|index| index >> 32);
        let mut c = [u64::from(self.position[0]); BLOCKS];
        let mut d = [u64::from(self.position[1]); BLOCKS];
        let mut key = self.key;
        for _ in 0..ROUNDS {
            for lane in 0..BLOCKS {
                let first = u64::from(MULTIPLIERS[0]) * word(a[lane]);
                let second = u64::from(MULTIPLIERS[1]) * word(c[lane]);
                a[lane] = (second >> 32) ^ b[lane] ^ u64::from(key[0]);
                b[lane] = second;
                c[lane] = (first >> 32) ^ d[lane] ^ u64::from(key[1]);
                d[lane] = first;
            }
            key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
        }
        std::array::from_fn(|lane| [a[lane], b[lane], c[lane], d[lane]].map(|word| word as u32))
    }
}

/// Returns the lower half of a lane.
#[inline(always)]
fn word(lane: u64) -> u64 {
    lane & u64::from(u32::MAX)
}

#[inline(always)]
fn scale<W: Real>(values: &mut [W], factors: &[W]) {
    for (value, factor) in values.iter_mut().zip(factors) {
        *value = *value * *factor;
    }
}
