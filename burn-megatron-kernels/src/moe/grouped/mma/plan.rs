//! Sizes of tiles, the groups of rows that cubes take, and which products they take.

use std::cmp::Reverse;

use super::super::groups;
use crate::cube::mma::swizzle::Swizzle;
use crate::cube::mma::{CHUNK, WARP};

/// Rows, and columns, of the result that a cube computes.
pub(super) const TILE: usize = 128;

/// Rows, and columns, of the result that a warp computes: each fragment serves four products, so that
/// shared memory keeps pace with the matrix units.
pub(super) const WARP_TILE: usize = 64;

/// Warps beside each other, and below each other.
pub(super) const WARPS: usize = TILE / WARP_TILE;

/// Units of a cube.
pub(super) const UNITS: usize = WARPS * WARPS * WARP;

/// Terms of the sums that are in shared memory at once.
pub(super) const DEPTH: usize = 32;

/// Tiles of both factors that are in shared memory, all but one of them on the way there.
pub(super) const STAGES: usize = 4;

/// Tiles of the result for each multiprocessor from which on the product of one expert keeps a GPU busy
/// by itself.
const BUSY: usize = 4;

/// The layout of a factor in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Factor {
    /// Whether its rows in memory are summed over, and not what lies beside each other in a row.
    pub by_depth: bool,
}

impl Factor {
    /// Rows of a tile in shared memory.
    pub fn rows(self) -> usize {
        if self.by_depth { DEPTH } else { TILE }
    }

    /// Returns the layout of the rows in shared memory.
    pub fn swizzle(self) -> Swizzle {
        let width = if self.by_depth { TILE } else { DEPTH };
        Swizzle {
            chunks: width / CHUNK,
        }
    }

    /// Bytes of a tile.
    pub fn bytes(self) -> usize {
        self.swizzle().bytes(self.rows())
    }

    /// Bytes from the part of one warp to that of the next.
    pub fn warp_bytes(self) -> usize {
        if self.by_depth {
            2 * WARP_TILE
        } else {
            self.swizzle().bytes(WARP_TILE)
        }
    }
}

/// The layouts of the factors that a kernel reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Factors {
    pub left: Factor,
    pub right: Factor,
    /// bf16, otherwise f16.
    pub bf16: bool,
}

impl Factors {
    /// Rows times weights, `transposed` if the terms of a sum lie beside each other.
    pub fn of_product(transposed: bool, bf16: bool) -> Self {
        Self {
            left: Factor { by_depth: false },
            right: Factor {
                by_depth: !transposed,
            },
            bf16,
        }
    }

    /// Transposed rows times gradients.
    pub fn of_weight_gradient(bf16: bool) -> Self {
        let factor = Factor { by_depth: true };
        Self {
            left: factor,
            right: factor,
            bf16,
        }
    }

    /// Bytes of a tile of both factors.
    pub fn stage(&self) -> usize {
        self.left.bytes() + self.right.bytes()
    }

    /// Bytes of shared memory.
    pub fn memory(&self) -> usize {
        STAGES * self.stage()
    }
}

/// The cubes' rows of the result: for each tile its expert, its first row and the end of the expert's.
pub(super) fn row_tiles(group_sizes: &[usize]) -> Vec<i32> {
    let tiles = groups(group_sizes).flat_map(|(expert, first, size)| {
        let end = first + size;
        let starts = (first..end).step_by(TILE);
        starts.map(move |start| [expert, start, end])
    });
    flatten(tiles)
}

/// Returns the rows that are summed for the weights of each expert: its number, its first row and their end. Experts
/// without rows are left out if `with_rows`. Those with the most rows come first, as they take the longest.
pub(super) fn summed_rows(group_sizes: &[usize], with_rows: bool) -> Vec<i32> {
    let all = groups(group_sizes).map(|(expert, first, size)| [expert, first, first + size]);
    let mut rows: Vec<_> = all
        .filter(|[_, first, end]| !with_rows || first < end)
        .collect();
    rows.sort_by_key(|[_, first, end]| Reverse(end - first));
    flatten(rows)
}

/// Numbers of rows and of experts are less than 2^31, as tensors have fewer than 2^32 elements and rows at
/// least [`CHUNK`] of them.
fn flatten(triples: impl IntoIterator<Item = [usize; 3]>) -> Vec<i32> {
    let numbers = triples.into_iter().flatten();
    numbers.map(|number| number as i32).collect()
}

/// Whether one launch computes the products of all experts, or a launch of the
/// [engine](crate::gemm) of single products each of them.
///
/// `launches` is the number of these, `[rows, columns]` the result of a mean one, on a GPU with so many
/// multiprocessors. Engines of single products are faster at a large product, by instructions such as
/// Hopper's `wgmma`; with fewer than [`BUSY`] tiles for each multiprocessor they leave more of the GPU
/// idle at the end of each product than that gains.
pub(super) fn in_one_launch(
    launches: usize,
    [rows, columns]: [usize; 2],
    multiprocessors: usize,
) -> bool {
    let tiles = rows.div_ceil(TILE) * columns.div_ceil(TILE);
    launches > 1 && tiles < BUSY * multiprocessors
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_the_rows_of_each_expert() {
        assert_eq!(
            row_tiles(&[0, 129, 0, 128, 3]),
            [[1, 0, 129], [1, 128, 129], [3, 129, 257], [4, 257, 260],].concat()
        );
        assert!(row_tiles(&[0, 0]).is_empty());
        let all = [[2, 3, 8], [0, 0, 3], [1, 3, 3]];
        assert_eq!(summed_rows(&[3, 0, 5], false), all.concat());
        assert_eq!(summed_rows(&[3, 0, 5], true), all[..2].concat());
    }

    #[test]
    fn units_copy_whole_tiles_with_one_permutation() {
        for by_depth in [false, true] {
            let factor = Factor { by_depth };
            let (rows, swizzle) = (factor.rows(), factor.swizzle());
            // Rows that units copy at once.
            let pass = UNITS / swizzle.group();
            assert_eq!(rows % pass, 0);
            assert_eq!(pass % 8, 0);
            assert_eq!(factor.bytes() % 128, 0);
            // A warp's part begins with a whole group of chunks.
            assert_eq!(factor.warp_bytes() % 128, 0);
        }
    }

    #[test]
    fn tiles_fit_into_the_memory_of_a_block() {
        // Compute capability 8.6 has the least of those with `cp.async`.
        const SMALL: usize = 99 * 1024;
        let all = [
            Factors::of_product(false, true),
            Factors::of_product(true, true),
            Factors::of_weight_gradient(true),
        ];
        for factors in all {
            assert!(factors.memory() <= SMALL);
            // The result is stored by way of the same memory.
            assert!(2 * TILE * TILE <= factors.memory());
        }
    }

    #[test]
    fn small_products_of_several_experts_are_one_launch() {
        let h100 = |launches, sizes| in_one_launch(launches, sizes, 132);
        // 64 experts of width 1408 for 4,096 tokens with 8 each; its gradients; 8 rows each.
        assert!(h100(64, [512, 2816]));
        assert!(h100(64, [2048, 2816]));
        assert!(h100(64, [8, 2816]));
        // Mixtral with 1,024 rows for each expert.
        assert!(!h100(8, [1024, 28672]));
        assert!(!h100(8, [4096, 28672]));
        // Few rows of it.
        assert!(h100(8, [128, 28672]));
        // One expert has all rows.
        assert!(!h100(1, [128, 128]));
    }
}
