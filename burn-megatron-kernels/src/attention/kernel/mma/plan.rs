//! How large the tiles are.

use burn::tensor::DType;
use cubecl::client::Client;
use cubecl::features::{MmaConfig, Plane};
use cubecl::ir::{ElemType, FloatKind};

use super::super::super::ops::HeadStrides;
use super::super::super::problem::AttentionProblem;
use super::super::plan::TilePlan;

/// Elements of 16 bytes: of one copy, and of one row of a matrix of `ldmatrix`.
pub(crate) const CHUNK: usize = 8;

/// Features of one step of a product; widths are multiples of it.
pub(crate) const STEP: usize = 16;

/// Units of a warp.
pub(crate) const WARP: usize = 32;

/// Warps of a cube.
const WARPS: usize = 4;

/// Exponentials are to the base 2.
pub(crate) const LOG2_E: f32 = std::f32::consts::LOG2_E;

/// The widest head whose sums stay in registers in both directions.
pub(crate) const MAX_WIDTH: usize = 128;

/// The sizes of a kernel's tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MmaShape {
    /// Features of a head.
    pub width: usize,
    /// Resident rows of a warp, in tiles of 16.
    pub row_tiles: usize,
    /// Rows of a streamed tile: columns of the scores.
    pub columns: usize,
    /// Resident tiles: queries, or a pair of which the first meets the first streamed tile and the
    /// second the second.
    pub resident: usize,
    /// Whether the fragments of the resident tiles stay in registers; otherwise they are loaded
    /// from shared memory for every streamed tile.
    pub in_registers: bool,
    /// Whether a value of f32 for each of two statistics is streamed with each row.
    pub statistics: bool,
    /// bf16, otherwise f16.
    pub bf16: bool,
}

impl MmaShape {
    /// Resident rows of a warp.
    pub(crate) fn warp_rows(&self) -> usize {
        16 * self.row_tiles
    }

    /// Resident rows.
    pub(crate) fn rows(&self) -> usize {
        WARPS * self.warp_rows()
    }

    /// Units of a cube.
    pub(crate) fn units(&self) -> usize {
        WARPS * WARP
    }

    /// 16-byte chunks of a row.
    pub(crate) fn chunks(&self) -> usize {
        self.width / CHUNK
    }

    /// Adjacent chunks among which a row's are permuted, so that the same chunks of eight rows lie
    /// in different banks: the largest of 2, 4 and 8 that divides a row's.
    pub(crate) fn group(&self) -> usize {
        1 << self.chunks().trailing_zeros().min(3)
    }

    /// Rows with the same permutation before the next.
    pub(crate) fn group_rows(&self) -> usize {
        8 / self.group()
    }

    /// Tiles of 16 by 8 of the scores of a warp.
    pub(crate) fn score_tiles(&self) -> usize {
        self.row_tiles * self.columns / 8
    }

    /// Tiles of 16 by 8 of a warp's sums over the features.
    pub(crate) fn sum_tiles(&self) -> usize {
        self.row_tiles * self.width / 8
    }

    /// Bytes of `rows` rows.
    pub(crate) fn bytes(&self, rows: usize) -> usize {
        2 * rows * self.width
    }

    /// Bytes of what is streamed at once: two tiles, and the statistics of their rows.
    pub(crate) fn stage(&self) -> usize {
        let statistics = if self.statistics { 8 * self.columns } else { 0 };
        2 * self.bytes(self.columns) + statistics
    }

    /// Bytes of shared memory: the resident tiles, then two stages.
    pub(crate) fn memory(&self) -> usize {
        self.resident * self.bytes(self.rows()) + 2 * self.stage()
    }
}

/// The tiles of forward, the gradient of the queries, and those of keys and values: two row tiles
/// where they leave enough registers, as each fragment of a streamed tile then serves twice.
pub(crate) fn shapes(width: usize, bf16: bool) -> [MmaShape; 3] {
    let narrow = width <= 64;
    let forward = MmaShape {
        width,
        row_tiles: if narrow { 2 } else { 1 },
        columns: if narrow { 32 } else { 64 },
        resident: 1,
        in_registers: true,
        statistics: false,
        bf16,
    };
    let queries = MmaShape {
        columns: 32,
        resident: 2,
        in_registers: !narrow,
        ..forward
    };
    let keys = MmaShape {
        in_registers: false,
        statistics: true,
        ..queries
    };
    [forward, queries, keys]
}

/// The tiles for a problem, whose rows are read 16 bytes at a time.
pub(super) fn plan(
    _client: &Client,
    problem: &AttentionProblem,
    _head_strides: &[HeadStrides],
) -> TilePlan<MmaShape> {
    let bf16 = problem.dtype == DType::BF16;
    let [forward, queries, keys] = shapes(problem.heads.width, bf16);
    TilePlan {
        vector: CHUNK,
        forward,
        queries,
        keys,
    }
}

/// What the device does not support of products of `dtype`.
pub(crate) fn missing_support(client: &Client, dtype: DType) -> Option<String> {
    let properties = client.properties();
    let kind = match dtype {
        DType::F16 => FloatKind::F16,
        DType::BF16 => FloatKind::BF16,
        other => return Some(format!("mma.sync takes F16 and BF16, not {other:?}")),
    };
    let wanted = MmaConfig {
        a_type: ElemType::Float(kind),
        b_type: ElemType::Float(kind),
        cd_type: ElemType::Float(FloatKind::F32),
        m: 16,
        n: 8,
        k: 16,
    };
    let features = &properties.features;
    let hardware = &properties.hardware;
    let checks = [
        (
            features.matmul.mma.contains(&wanted),
            "mma.sync of 16x8x16 with sums in f32",
        ),
        (
            features.matmul.ldmatrix.contains(&wanted.a_type),
            "ldmatrix",
        ),
        (features.copy_async, "cp.async"),
        (features.plane.contains(Plane::Ops), "warp shuffles"),
        (features.plane.contains(Plane::Sync), "warp barriers"),
        (
            hardware.plane_size_min == WARP as u32 && hardware.plane_size_max == WARP as u32,
            "warps of 32 units",
        ),
    ];
    let missing = checks.iter().find(|(is_there, _)| !is_there);
    missing.map(|(_, what)| format!("the device has no {what} in {dtype:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> impl Iterator<Item = MmaShape> {
        (STEP..=MAX_WIDTH)
            .step_by(STEP)
            .flat_map(|width| shapes(width, false))
    }

    #[test]
    fn tiles_of_every_width_fit_into_the_memory_of_a_block() {
        // Compute capability 8.6 has the least of those with `cp.async`.
        const SMALL: usize = 99 * 1024;
        for shape in all() {
            assert!(shape.memory() <= SMALL, "{shape:?}: {}", shape.memory());
        }
    }

    #[test]
    fn units_copy_whole_rows_and_own_whole_chunks() {
        for shape in all() {
            let group = shape.group();
            assert_eq!(shape.chunks() % group, 0, "{shape:?}");
            // The permutation of a unit's chunk is that of all rows that it copies.
            assert_eq!(shape.units() / group % 8, 0, "{shape:?}");
            assert_eq!(shape.warp_rows() * group % WARP, 0, "{shape:?}");
            assert_eq!(shape.memory() % 128, 0, "{shape:?}");
            assert!(2 * shape.columns <= shape.units(), "{shape:?}");
        }
    }

    #[test]
    fn the_same_chunks_of_eight_rows_lie_in_different_banks() {
        for shape in all() {
            let place = |row: usize, chunk: usize| {
                let permuted = chunk ^ (row / shape.group_rows() % shape.group());
                row * shape.chunks() + permuted
            };
            for chunk in 0..shape.chunks() {
                let mut banks: Vec<_> = (0..8).map(|row| place(row, chunk) % 8).collect();
                banks.sort_unstable();
                assert_eq!(banks, [0, 1, 2, 3, 4, 5, 6, 7], "{shape:?}: chunk {chunk}");
            }
        }
    }
}
