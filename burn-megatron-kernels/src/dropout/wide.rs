//! Masks on the CPU: many Philox blocks side by side.

use super::Mask;
use crate::cpu::Real;
use crate::philox::{MULTIPLIERS, ROUNDS, WEYL, block};

/// Blocks that are drawn at once: one register of AVX-512, two of AVX2, for each word.
const BLOCKS: usize = 16;
/// Words of these blocks.
const WORDS: usize = 4 * BLOCKS;
/// Draws below which single blocks are less work.
const FEW: usize = WORDS / 4;

impl Mask {
    /// Multiplies `values`, elements `start..` of the tensor, with the mask.
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

    /// Multiplies `values` with the factors of the draws from `draw` on.
    #[inline(always)]
    fn multiply_run<W: Real>(&self, mut draw: u64, mut values: &mut [W]) {
        while !values.is_empty() {
            let offset = (draw % 4) as usize;
            let count;
            if values.len() < FEW {
                count = (4 - offset).min(values.len());
                let words = block(self.key, self.counter(draw / 4));
                let factors = words.map(|word| self.factor::<W>(word));
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

    #[inline(always)]
    fn factor<W: Real>(&self, word: u32) -> W {
        if word < self.threshold {
            W::of(f64::from(self.scale))
        } else {
            W::ZERO
        }
    }

    /// The factors of the draws of [`BLOCKS`] blocks.
    #[inline(always)]
    fn factors<W: Real>(&self, first: u64) -> [W; WORDS] {
        let words = self.blocks(first);
        let mut factors = [W::ZERO; WORDS];
        for lane in 0..BLOCKS {
            for word in 0..4 {
                factors[4 * lane + word] = self.factor(words[word][lane]);
            }
        }
        factors
    }

    /// [`block`] for [`BLOCKS`] indices from `first` on: word `w` of block `i` is `[w][i]`.
    #[inline(always)]
    fn blocks(&self, first: u64) -> [[u32; BLOCKS]; 4] {
        let [low, high]: [[u32; BLOCKS]; 2] = [0, 32].map(|shift| {
            // Blocks past the last one are drawn, and never used.
            std::array::from_fn(|lane| (first.wrapping_add(lane as u64) >> shift) as u32)
        });
        let mut a = low;
        let mut b = high;
        let mut c = [self.position[0]; BLOCKS];
        let mut d = [self.position[1]; BLOCKS];
        let mut key = self.key;
        for _ in 0..ROUNDS {
            for lane in 0..BLOCKS {
                let first = u64::from(MULTIPLIERS[0]) * u64::from(a[lane]);
                let second = u64::from(MULTIPLIERS[1]) * u64::from(c[lane]);
                a[lane] = (second >> 32) as u32 ^ b[lane] ^ key[0];
                b[lane] = second as u32;
                c[lane] = (first >> 32) as u32 ^ d[lane] ^ key[1];
                d[lane] = first as u32;
            }
            key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
        }
        [a, b, c, d]
    }
}

#[inline(always)]
fn scale<W: Real>(values: &mut [W], factors: &[W]) {
    for (value, factor) in values.iter_mut().zip(factors) {
        *value = *value * *factor;
    }
}
