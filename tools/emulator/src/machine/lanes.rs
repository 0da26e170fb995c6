//! The lanes of a warp.

/// The number of threads of a warp.
pub const LANES: usize = 32;

/// A register of a warp: the bits of each lane. The upper bits of narrower types are zero.
pub type Lanes = [u64; LANES];

/// A set of lanes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mask(pub u32);

impl Mask {
    /// All lanes.
    pub const ALL: Self = Self(u32::MAX);

    /// Returns the numbers of the lanes, in ascending order.
    #[inline]
    pub fn lanes(self) -> impl Iterator<Item = usize> {
        let mut left = self.0;
        std::iter::from_fn(move || {
            let lane = left.trailing_zeros();
            left &= left.wrapping_sub(1);
            (lane < 32).then_some(lane as usize)
        })
    }

    /// Returns whether a lane is in the set.
    #[inline]
    pub fn has(self, lane: usize) -> bool {
        self.0 >> lane & 1 == 1
    }

    /// Returns the number of lanes.
    pub fn count(self) -> usize {
        self.0.count_ones() as usize
    }
}
