//! The layout of 16-bit tiles in shared memory, and reads of these tiles as fragments.
//!
//! Chunk `c` of row `r` is stored as chunk `c ^ (r / group_rows % group)` of the row, so that
//! neither copies nor fragments have bank conflicts.

use cubecl::prelude::*;

use super::ptx::{Quad, load_matrices};
use super::{CHUNK_BYTES, WARP};

/// The layout of rows in shared memory, in chunks of 16 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Swizzle {
    /// The number of chunks per row.
    pub chunks: usize,
}

impl Swizzle {
    /// Returns the number of adjacent chunks that are permuted together. It is the largest of 2, 4 and 8 that divides
    /// the number of chunks per row. With this permutation, chunks of the same column in eight rows lie in different
    /// banks.
    pub(crate) fn group(&self) -> usize {
        1 << self.chunks.trailing_zeros().min(3)
    }

    /// Returns the number of consecutive rows with the same permutation.
    pub(crate) fn group_rows(&self) -> usize {
        8 / self.group()
    }

    /// Returns the size of `rows` rows in bytes.
    pub(crate) fn bytes(&self, rows: usize) -> usize {
        rows * self.chunks * CHUNK_BYTES
    }
}

/// Returns the permutation of the chunks of row `row`.
#[cube]
pub(crate) fn permutation(row: u32, #[comptime] swizzle: Swizzle) -> u32 {
    row / comptime!(swizzle.group_rows() as u32) % comptime!(swizzle.group() as u32)
}

/// Returns the address from which this lane reads the fragments of a tile at `tile`. The rows of the tile are the rows
/// of a left operand, or the summed dimension of a right operand. A right operand is read `transposed`.
#[cube]
pub(crate) fn row_lane(tile: u32, #[comptime] swizzle: Swizzle) -> u32 {
    let lane = UNIT_POS % comptime!(WARP as u32);
    lane_address(tile, lane % 16, lane / 16, swizzle)
}

/// Returns the address from which this lane reads the fragments of a tile at `tile`. The rows of the tile are the
/// columns of a right operand, or the summed dimension of a left operand. A left operand is read `transposed`.
#[cube]
pub(crate) fn column_lane(tile: u32, #[comptime] swizzle: Swizzle) -> u32 {
    let lane = UNIT_POS % comptime!(WARP as u32);
    lane_address(tile, lane % 8 + lane / 16 * 8, lane / 8 % 2, swizzle)
}

#[cube]
fn lane_address(tile: u32, row: u32, chunk: u32, #[comptime] swizzle: Swizzle) -> u32 {
    let place = row * comptime!(swizzle.chunks as u32) + (chunk ^ permutation(row % 8, swizzle));
    tile + place * comptime!(CHUNK_BYTES as u32)
}

/// Returns a fragment of 16 rows, starting at `row`, and 16 elements of each row, starting at element `16 step`. `lane`
/// is the result of [`row_lane`] or [`column_lane`] for the tile.
#[cube]
pub(crate) fn fragment(
    lane: u32,
    #[comptime] row: usize,
    #[comptime] step: usize,
    #[comptime] transposed: bool,
    #[comptime] swizzle: Swizzle,
) -> Vector<u32, Quad> {
    // The steps of a group differ in the permuted bits of the address. Groups and rows differ in higher bits.
    let steps = comptime!(swizzle.group() / 2);
    let within = comptime!((step % steps * 2 * CHUNK_BYTES) as u32);
    let above =
        comptime!((swizzle.bytes(row) + step / steps * swizzle.group() * CHUNK_BYTES) as u32);
    load_matrices((lane ^ within) + above, transposed)
}

/// Returns the row with number `index` that this lane holds, counted from the first row of the warp.
#[cube]
pub(crate) fn lane_row(#[comptime] index: usize) -> u32 {
    UNIT_POS % comptime!(WARP as u32) / 4 + comptime!((8 * index) as u32)
}

/// Returns the first of the two columns that this lane holds in a 16 by 8 tile.
#[cube]
pub(crate) fn lane_column() -> u32 {
    UNIT_POS % 4 * 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_chunks_of_eight_rows_lie_in_different_banks() {
        for chunks in (2..=32).step_by(2) {
            let swizzle = Swizzle { chunks };
            let (group, group_rows) = (swizzle.group(), swizzle.group_rows());
            assert_eq!(chunks % group, 0);
            let place = |row: usize, chunk: usize| {
                let permuted = chunk ^ (row / group_rows % group);
                row * chunks + permuted
            };
            for chunk in 0..chunks {
                let mut banks: Vec<_> = (0..8).map(|row| place(row, chunk) % 8).collect();
                banks.sort_unstable();
                assert_eq!(banks, [0, 1, 2, 3, 4, 5, 6, 7], "{chunks}: chunk {chunk}");
            }
        }
    }
}
