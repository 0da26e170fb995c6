//! Scales of 8-bit factors ("Scaling factors layouts" in the documentation).
//!
//! A factor has `outer` rows (`A`) or columns (`B`) of `k` elements.

use crate::element::Element;

/// The part of a matrix that shares a scale: `cublasLtMatmulMatrixScale_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum ScaleMode {
    /// The whole matrix.
    Scalar,
    /// 32 elements along `k`. Scales are powers of two.
    Vec32,
    /// Each row of `A`, or each column of `B`.
    OuterVec,
    /// 128 elements along `k`.
    Vec128,
    /// 128 x 128 elements.
    Blocks,
}

use ScaleMode::{Blocks, OuterVec, Scalar, Vec32, Vec128};

impl ScaleMode {
    pub(super) fn of(number: i32) -> Option<Self> {
        match number {
            0 => Some(Scalar),
            2 => Some(Vec32),
            3 => Some(OuterVec),
            4 => Some(Vec128),
            5 => Some(Blocks),
            _ => None,
        }
    }

    fn element_bytes(self) -> usize {
        match self {
            Vec32 => 1,
            _ => 4,
        }
    }

    /// Returns the alignment of the address of the scales.
    pub(super) fn alignment(self) -> u64 {
        match self {
            Scalar | OuterVec => 4,
            Vec32 | Vec128 | Blocks => 16,
        }
    }

    /// Returns the size of the scales in bytes.
    pub(super) fn bytes(self, outer: usize, k: usize) -> usize {
        let count = match self {
            Scalar => 1,
            OuterVec => outer,
            Vec128 => outer * k.div_ceil(128),
            Blocks => outer.div_ceil(128) * blocks_in_a_column(k),
            // Whole tiles of 128 by 4.
            Vec32 => outer.next_multiple_of(128) * k.div_ceil(128) * 4,
        };
        count * self.element_bytes()
    }

    /// Returns the index of the scale of an element.
    fn index(self, outer: usize, k: usize, [outers, depth]: [usize; 2]) -> usize {
        match self {
            Scalar => 0,
            OuterVec => outer,
            Vec128 => k / 128 * outers + outer,
            Blocks => outer / 128 * blocks_in_a_column(depth) + k / 128,
            Vec32 => {
                let tile = outer / 128 * depth.div_ceil(128) + k / 128;
                tile * 512 + outer % 32 * 16 + outer % 128 / 32 * 4 + k / 32 % 4
            }
        }
    }

    /// Returns the scale of an element of a factor of `sizes`, `[outer, k]`.
    ///
    /// # Safety
    /// `scales` must be valid for reading [`bytes`](Self::bytes) bytes.
    pub(super) unsafe fn load(self, scales: u64, outer: usize, k: usize, sizes: [usize; 2]) -> f64 {
        let index = self.index(outer, k, sizes);
        let address = scales + (index * self.element_bytes()) as u64;
        // SAFETY: guaranteed by the caller of this function, since the index is below the number of scales.
        unsafe {
            match self {
                Vec32 => power_of_two(*(address as *const u8)),
                _ => Element::F32.load(address),
            }
        }
    }
}

/// Returns the number of blocks in a column. It is a multiple of 4.
fn blocks_in_a_column(k: usize) -> usize {
    k.div_ceil(128).next_multiple_of(4)
}

/// Decodes E8M0.
fn power_of_two(code: u8) -> f64 {
    match code {
        0xff => f64::NAN,
        _ => 2f64.powi(i32::from(code) - 127),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODES: [ScaleMode; 5] = [Scalar, Vec32, OuterVec, Vec128, Blocks];

    #[test]
    fn numbers_are_those_of_the_header() {
        let numbers = [0, 2, 3, 4, 5];
        assert_eq!(numbers.map(ScaleMode::of), MODES.map(Some));
        assert!(
            [-1, 1, 6, 12]
                .into_iter()
                .all(|number| ScaleMode::of(number).is_none())
        );
    }

    #[test]
    fn every_scale_lies_inside_and_is_used() {
        for sizes @ [outer, k] in [[1, 1], [16, 16], [144, 160], [128, 512], [300, 700]] {
            for mode in MODES {
                let words = mode.bytes(outer, k) / mode.element_bytes();
                let mut used = vec![false; words];
                for row in 0..outer {
                    for at in 0..k {
                        used[mode.index(row, at, sizes)] = true;
                    }
                }
                let filled = used.iter().filter(|used| **used).count();
                let fits = match mode {
                    Scalar => 1,
                    OuterVec => outer,
                    Vec128 => outer * k.div_ceil(128),
                    Blocks => outer.div_ceil(128) * k.div_ceil(128),
                    Vec32 => outer * k.div_ceil(32),
                };
                assert_eq!(filled, fits, "{mode:?} {sizes:?}");
            }
        }
    }

    /// Checks the order of scales in tiles. The documentation maps a position in a tile to an element, and the upper
    /// left corner of a tile to the address of the tile. The test follows the order of the bytes.
    #[test]
    fn powers_of_two_lie_in_tiles() {
        let (outer, k) = (300usize, 700usize);
        let scales_of_a_row = 4 * k.div_ceil(128);
        for place in 0..Vec32.bytes(outer, k) {
            let (tile, offset) = (place / 512, place % 512);
            let (mut corner_outer, mut corner_inner) = (0, 0);
            for _ in 0..tile {
                corner_inner += 4;
                if corner_inner == scales_of_a_row {
                    (corner_outer, corner_inner) = (corner_outer + 128, 0);
                }
            }
            assert_eq!(
                corner_inner * 128 + corner_outer * scales_of_a_row,
                tile * 512
            );
            let row = corner_outer + (offset % 16) / 4 * 32 + offset / 16;
            let inner = corner_inner + offset % 4;
            if row < outer && inner * 32 < k {
                for at in inner * 32..k.min(inner * 32 + 32) {
                    assert_eq!(Vec32.index(row, at, [outer, k]), place);
                }
            }
        }
    }

    /// Two rows of blocks of a matrix with 5 blocks along `k`: the rows are 8 scales apart.
    #[test]
    fn blocks_go_along_k_first_and_vectors_along_the_outer_side() {
        let sizes = [200, 520];
        assert_eq!(Blocks.index(0, 519, sizes), 4);
        assert_eq!(Blocks.index(127, 127, sizes), 0);
        assert_eq!(Blocks.index(128, 0, sizes), 8);
        assert_eq!(Blocks.index(199, 519, sizes), 12);
        assert_eq!(Blocks.bytes(200, 520), 64);
        assert_eq!(Vec128.index(0, 128, sizes), 200);
        assert_eq!(Vec128.index(7, 519, sizes), 807);
        assert_eq!(Vec128.bytes(200, 520), 4000);
    }

    #[test]
    fn codes_are_powers_of_two() {
        assert_eq!(
            [0, 127, 130, 254].map(power_of_two),
            [2f64.powi(-127), 1.0, 8.0, 2f64.powi(127)]
        );
        assert!(power_of_two(255).is_nan());
    }
}
