//! Reproducible random numbers.

/// SplitMix64 (Steele et al. 2014, "Fast splittable pseudorandom number generators").
pub struct Random(u64);

impl Random {
    /// Returns the stream of a round of a seed.
    pub fn new(seed: u64, round: u64) -> Self {
        let mut random = Self(seed);
        Self(random.next() ^ round.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number from 0 to below `below`.
    pub fn below(&mut self, below: usize) -> usize {
        (self.next() % below as u64) as usize
    }

    /// Returns a number from `range.0` to `range.1`, both included.
    pub fn within(&mut self, range: (usize, usize)) -> usize {
        range.0 + self.below(range.1 - range.0 + 1)
    }

    /// Returns one of the values.
    pub fn one_of<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    /// Returns `true` in one of `of` cases.
    pub fn once_in(&mut self, of: usize) -> bool {
        self.below(of) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_is_drawn_alike_again_and_others_are_not() {
        let draw = |seed, round| {
            let mut random = Random::new(seed, round);
            [(); 4].map(|()| random.next())
        };
        assert_eq!(draw(7, 3), draw(7, 3));
        assert_ne!(draw(7, 3), draw(7, 4));
        assert_ne!(draw(7, 3), draw(8, 3));
        let mut random = Random::new(1, 1);
        let drawn: Vec<_> = (0..200).map(|_| random.within((2, 4))).collect();
        assert!([2, 3, 4].iter().all(|n| drawn.contains(n)));
        assert!(drawn.iter().all(|n| (2..=4).contains(n)));
    }
}
