//! The tile sizes of the tensor core kernels.

use burn::tensor::DType;
use cubecl::client::Client;

use super::super::super::ops::HeadStrides;
use super::super::super::problem::AttentionProblem;
use super::super::plan::TilePlan;
use crate::cube::mma::swizzle::Swizzle;
use crate::cube::mma::{CHUNK, PAIR, WARP};

/// The number of features per step of a matrix multiplication. Widths are multiples of this number.
pub(crate) const STEP: usize = 16;

/// The number of warps per cube.
const WARPS: usize = 4;

/// The factor that converts exponents of base e to exponents of base 2.
pub(crate) const LOG2_E: f32 = std::f32::consts::LOG2_E;

/// The maximum width of a head for which the sums stay in registers in the forward and the backward pass.
pub(crate) const MAX_WIDTH: usize = 256;

/// The maximum width for which a warp has enough registers for two row tiles.
const NARROW: usize = 64;

/// The width above which streamed tiles have fewer rows, so that they fit into shared memory.
const WIDE: usize = 128;

/// The maximum width for which queries stay in registers in the forward pass.
const MAX_KEPT: usize = 192;

/// The maximum sum of key width and value width for which the gradient sums of both stay in registers.
const MAX_SUMMED: usize = 320;

/// The tile sizes and the compile-time parameters of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MmaShape {
    /// The number of features per head of queries and keys.
    pub width: usize,
    /// The number of features per head of values.
    pub value_width: usize,
    /// The number of resident rows per warp, in tiles of 16 rows.
    pub row_tiles: usize,
    /// The number of rows of a streamed tile. These rows are the columns of the scores.
    pub columns: usize,
    /// Whether there is a second resident tile, which is multiplied with the second streamed tile.
    pub paired: bool,
    /// Whether the fragments of the resident tiles stay in registers. Otherwise they are loaded
    /// from shared memory for every streamed tile.
    pub in_registers: bool,
    /// Whether each streamed row has two statistics in f32.
    pub statistics: bool,
    /// Whether the kernel for keys computes the gradients of keys. Other kernels ignore this field.
    pub sums_keys: bool,
    /// Whether the kernel for keys computes the gradients of values. Other kernels ignore this field.
    pub sums_values: bool,
    /// Whether the element type is bf16. Otherwise it is f16.
    pub bf16: bool,
}

impl MmaShape {
    /// Returns the same parameters for tiles with the width of the values.
    pub(crate) fn of_values(&self) -> Self {
        Self {
            width: self.value_width,
            ..*self
        }
    }

    /// Returns the number of resident rows per warp.
    pub(crate) fn warp_rows(&self) -> usize {
        16 * self.row_tiles
    }

    /// Returns the number of resident rows.
    pub(crate) fn rows(&self) -> usize {
        WARPS * self.warp_rows()
    }

    /// Returns the number of units per cube.
    pub(crate) fn units(&self) -> usize {
        WARPS * WARP
    }

    /// Returns the layout of rows in shared memory.
    pub(crate) fn swizzle(&self) -> Swizzle {
        let chunks = self.width / CHUNK;
        Swizzle { chunks }
    }

    /// Returns the number of 16 by 8 tiles in a warp's scores.
    pub(crate) fn score_tiles(&self) -> usize {
        self.row_tiles * self.columns / 8
    }

    /// Returns the number of 16 by 8 tiles in a warp's sums over the features.
    pub(crate) fn sum_tiles(&self) -> usize {
        self.row_tiles * self.width / 8
    }

    /// Returns the size of `rows` rows in bytes.
    pub(crate) fn bytes(&self, rows: usize) -> usize {
        2 * rows * self.width
    }

    /// Returns the number of bytes in a stage, which is streamed at once: two tiles and the statistics of their rows.
    pub(crate) fn stage(&self) -> usize {
        let statistics = if self.statistics { 8 * self.columns } else { 0 };
        self.bytes_of_both(self.columns) + statistics
    }

    /// Returns the number of bytes of `rows` rows of queries or keys, and of the same number of value rows.
    fn bytes_of_both(&self, rows: usize) -> usize {
        self.bytes(rows) + self.of_values().bytes(rows)
    }

    /// Returns the number of bytes of shared memory: the resident tiles, and two stages.
    pub(crate) fn memory(&self) -> usize {
        let resident = if self.paired {
            self.bytes_of_both(self.rows())
        } else {
            self.bytes(self.rows())
        };
        resident + 2 * self.stage()
    }
}

/// Returns the tile sizes for heads of these widths. Rows are read 16 bytes at a time.
///
/// There are two row tiles per warp if enough registers are left, because each fragment of a streamed tile is then used
/// twice. If the gradient sums of keys and values do not fit into the registers together, each of them has its own
/// launch.
pub(super) fn shapes(width: usize, value_width: usize, bf16: bool) -> TilePlan<MmaShape> {
    let (narrow, wide) = (width <= NARROW, width > WIDE);
    let forward = MmaShape {
        width,
        value_width,
        row_tiles: if narrow { 2 } else { 1 },
        columns: if narrow || wide { 32 } else { 64 },
        paired: false,
        in_registers: width <= MAX_KEPT,
        statistics: false,
        sums_keys: true,
        sums_values: true,
        bf16,
    };
    let queries = MmaShape {
        columns: if wide { 16 } else { 32 },
        paired: true,
        in_registers: !narrow && !wide,
        ..forward
    };
    let keys = MmaShape {
        in_registers: false,
        statistics: true,
        ..queries
    };
    let keys = if width + value_width <= MAX_SUMMED {
        vec![keys]
    } else {
        let part = |sums_keys| MmaShape {
            sums_keys,
            sums_values: !sums_keys,
            ..keys
        };
        vec![part(true), part(false)]
    };
    TilePlan {
        vector: CHUNK,
        flat_vector: PAIR,
        forward,
        queries,
        keys,
    }
}

/// Returns the maximum number of bytes of shared memory per block for heads of these widths.
pub(in crate::attention) fn shared_memory(width: usize, value_width: usize) -> usize {
    let plan = shapes(width, value_width, false);
    let keys = plan.keys.iter().map(MmaShape::memory);
    let others = [plan.forward, plan.queries].map(|shape| shape.memory());
    keys.chain(others).max().unwrap_or(0)
}

/// Returns the tiles for a problem.
pub(in super::super) fn plan(
    _client: &Client,
    problem: &AttentionProblem,
    _head_strides: &[HeadStrides],
) -> TilePlan<MmaShape> {
    let bf16 = problem.dtype == DType::BF16;
    shapes(problem.heads.width, problem.value_width, bf16)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> impl Iterator<Item = MmaShape> {
        let widths = (STEP..=MAX_WIDTH).step_by(STEP);
        let pairs = widths.flat_map(|width| [(width, width), (width, STEP)]);
        pairs.flat_map(|(width, values)| {
            let plan = shapes(width, values, false);
            [vec![plan.forward, plan.queries], plan.keys].concat()
        })
    }

    #[test]
    fn tiles_of_every_width_fit_into_the_memory_of_a_block() {
        // The smallest shared memory of all devices with `cp.async`, which is the shared memory of compute capability
        // 8.6.
        const SMALL: usize = 99 * 1024;
        for shape in all() {
            assert!(shape.memory() <= SMALL, "{shape:?}: {}", shape.memory());
        }
    }

    #[test]
    fn units_copy_whole_rows_and_own_whole_chunks() {
        for shape in all().flat_map(|shape| [shape, shape.of_values()]) {
            let group = shape.swizzle().group();
            // All rows that a unit copies must have the same permutation of chunks.
            assert_eq!(shape.units() / group % 8, 0, "{shape:?}");
            assert_eq!(shape.warp_rows() * group % WARP, 0, "{shape:?}");
            assert_eq!(shape.memory() % 128, 0, "{shape:?}");
            assert!(2 * shape.columns <= shape.units(), "{shape:?}");
        }
    }
}
