//! The tile sizes, the groups of rows that cubes process, and the selection of the kernels.

use std::cmp::Reverse;

use super::super::groups;
use crate::cube::mma::swizzle::Swizzle;
use crate::cube::mma::{CHUNK, WARP};

/// The number of rows, and of columns, of the result that a cube computes.
pub(super) const TILE: usize = 128;

/// The number of rows, and of columns, of the result that a warp computes. With this number, each fragment is used in
/// four tile multiplications, so that shared memory keeps up with the tensor cores.
pub(super) const WARP_TILE: usize = 64;

/// The number of warps in each direction.
pub(super) const WARPS: usize = TILE / WARP_TILE;

/// The number of units per cube.
pub(super) const UNITS: usize = WARPS * WARPS * WARP;

/// The number of terms of each sum that are in shared memory at the same time.
pub(super) const DEPTH: usize = 32;

/// The number of tiles per operand in shared memory. All tiles except one are being copied.
pub(super) const STAGES: usize = 4;

/// The minimum number of result tiles per multiprocessor with which the multiplication of a single expert keeps a GPU
/// busy.
const BUSY: usize = 4;

/// The layout of an operand in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Factor {
    /// Whether sums run over the rows in memory. Otherwise they run along a row.
    pub by_depth: bool,
}

impl Factor {
    /// Returns the number of rows of a tile in shared memory.
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

    /// Returns the size of a tile in bytes.
    pub fn bytes(self) -> usize {
        self.swizzle().bytes(self.rows())
    }

    /// Returns the number of bytes between the parts of two consecutive warps.
    pub fn warp_bytes(self) -> usize {
        if self.by_depth {
            2 * WARP_TILE
        } else {
            self.swizzle().bytes(WARP_TILE)
        }
    }
}

/// The layouts of both operands of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Factors {
    pub left: Factor,
    pub right: Factor,
    /// Whether the element type is bf16. Otherwise it is f16.
    pub bf16: bool,
}

impl Factors {
    /// Returns the layouts for the multiplication of rows by weights. The weights are `transposed` if the terms of a
    /// sum are adjacent in memory.
    pub fn of_product(transposed: bool, bf16: bool) -> Self {
        Self {
            left: Factor { by_depth: false },
            right: Factor {
                by_depth: !transposed,
            },
            bf16,
        }
    }

    /// Returns the layouts for the multiplication of transposed rows by gradients.
    pub fn of_weight_gradient(bf16: bool) -> Self {
        let factor = Factor { by_depth: true };
        Self {
            left: factor,
            right: factor,
            bf16,
        }
    }

    /// Returns the number of bytes of one tile of each operand.
    pub fn stage(&self) -> usize {
        self.left.bytes() + self.right.bytes()
    }

    /// Returns the number of bytes of shared memory.
    pub fn memory(&self) -> usize {
        STAGES * self.stage()
    }
}

/// Returns the rows of the result that each cube processes. For each tile, the list contains the expert, the first row,
/// and the end of the expert's rows.
pub(super) fn row_tiles(group_sizes: &[usize]) -> Vec<i32> {
    let tiles = groups(group_sizes).flat_map(|(expert, first, size)| {
        let end = first + size;
        let starts = (first..end).step_by(TILE);
        starts.map(move |start| [expert, start, end])
    });
    flatten(tiles)
}

/// Returns the rows that are summed for the weight gradient of each expert. For each expert, the list contains its
/// index, its first row, and the end of its rows. Experts without rows are excluded if `with_rows` is true. The experts
/// with the most rows come first, because they take the longest.
pub(super) fn summed_rows(group_sizes: &[usize], with_rows: bool) -> Vec<i32> {
    let all = groups(group_sizes).map(|(expert, first, size)| [expert, first, first + size]);
    let mut rows: Vec<_> = all
        .filter(|[_, first, end]| !with_rows || first < end)
        .collect();
    rows.sort_by_key(|[_, first, end]| Reverse(end - first));
    flatten(rows)
}

/// Flattens triples of row and expert indices. All indices are less than 2^31, because tensors have fewer than 2^32
/// elements and a row has at least [`CHUNK`] elements.
fn flatten(triples: impl IntoIterator<Item = [usize; 3]>) -> Vec<i32> {
    let numbers = triples.into_iter().flatten();
    numbers.map(|number| number as i32).collect()
}

/// Returns whether one kernel launch computes all experts. Otherwise the [engine](crate::gemm) for single matrix
/// multiplications computes each expert with its own launch.
///
/// `launches` is the number of launches of that engine, and `[rows, columns]` is the average size of their results. The
/// engine for single multiplications is faster for a large result, because it uses instructions such as `wgmma` on
/// Hopper. With fewer than [`BUSY`] tiles per multiprocessor, this gain is smaller than the loss from multiprocessors
/// that are idle at the end of each launch.
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
            // The number of rows that units copy at once.
            let pass = UNITS / swizzle.group();
            assert_eq!(rows % pass, 0);
            assert_eq!(pass % 8, 0);
            assert_eq!(factor.bytes() % 128, 0);
            // A warp's part starts at a complete group of chunks.
            assert_eq!(factor.warp_bytes() % 128, 0);
        }
    }

    #[test]
    fn tiles_fit_into_the_memory_of_a_block() {
        // The smallest shared memory of all devices with `cp.async`, which is the shared memory of compute capability
        // 8.6.
        const SMALL: usize = 99 * 1024;
        let all = [
            Factors::of_product(false, true),
            Factors::of_product(true, true),
            Factors::of_weight_gradient(true),
        ];
        for factors in all {
            assert!(factors.memory() <= SMALL);
            // The result is staged in the same memory before it is stored.
            assert!(2 * TILE * TILE <= factors.memory());
        }
    }

    #[test]
    fn small_products_of_several_experts_are_one_launch() {
        let h100 = |launches, sizes| in_one_launch(launches, sizes, 132);
        // 64 experts of width 1408 with 512 rows each, as for 4,096 tokens with 8 choices. The following cases are the
        // gradients, and 8 rows per expert.
        assert!(h100(64, [512, 2816]));
        assert!(h100(64, [2048, 2816]));
        assert!(h100(64, [8, 2816]));
        // Mixtral with 1,024 rows per expert.
        assert!(!h100(8, [1024, 28672]));
        assert!(!h100(8, [4096, 28672]));
        // Mixtral with few rows.
        assert!(h100(8, [128, 28672]));
        // A single expert has all rows.
        assert!(!h100(1, [128, 128]));
    }
}
