//! How large the tiles of the matrix units are.

use burn::tensor::DType;
use cubecl::client::Client;
use cubecl::features::{MmaConfig, Plane};
use cubecl::ir::{ElemType, FloatKind};

use super::super::super::ops::HeadStrides;
use super::super::super::problem::AttentionProblem;
use super::super::plan::{TilePlan, vector};

/// Rows, columns and depth of one product of the matrix units.
pub(crate) const TILE: usize = 16;

/// Units of a warp tile of [`TILE`] rows: a plane (CUDA: warp). Each row has two of them.
pub(crate) const WARP_UNITS: usize = 32;

/// The widest head whose sums stay in registers.
pub(crate) const MAX_WIDTH: usize = 128;

/// Elements of a load of 128 bits.
pub(super) const MAX_VECTOR: usize = 8;

/// Padding of a row in shared memory, in elements: consecutive rows start in different banks, and
/// keep the 16-byte alignment that matrix loads need.
const BANK_PADDING: usize = 8;

/// Shared memory per cube up to which two cubes fit on a multiprocessor.
const SHARED_MEMORY_TARGET: usize = 80 * 1024;

/// Planes and columns, the best first. Each asks for less memory than the one before.
const FORWARD: [[usize; 2]; 5] = [[4, 64], [4, 32], [2, 32], [1, 32], [1, 16]];
const BACKWARD: [[usize; 2]; 4] = [[4, 32], [2, 32], [1, 32], [1, 16]];

/// How tiles are multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum TileMultiplier {
    /// The matrix units.
    MatrixUnits,
    /// Plain loops over the same tiles, on every device: only the matrix instructions differ.
    #[cfg_attr(not(test), allow(dead_code))]
    Loops,
}

/// The sizes of a kernel's tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MatrixTiles {
    /// Warp tiles of [`TILE`] rows in the resident tile.
    pub planes: usize,
    /// Rows of a streamed tile: columns of the scores.
    pub columns: usize,
    /// Features of a head.
    pub width: usize,
    /// Elements of a load.
    pub vector: usize,
    /// How tiles are multiplied.
    pub products: TileMultiplier,
}

impl MatrixTiles {
    /// Rows of the resident tile.
    pub(crate) fn rows(&self) -> usize {
        self.planes * TILE
    }

    /// Units of a cube.
    pub(crate) fn units(&self) -> usize {
        self.planes * WARP_UNITS
    }

    /// From row to row of a tile, in elements.
    pub(crate) fn pitch(&self) -> usize {
        self.width + BANK_PADDING
    }

    /// From row to row of a tile, in vectors.
    pub(crate) fn vectors(&self) -> usize {
        self.pitch() / self.vector
    }

    /// From row to row of the weights, in elements.
    pub(crate) fn weight_pitch(&self) -> usize {
        self.columns + BANK_PADDING
    }

    /// From row to row of the products in f32.
    pub(crate) fn scratch_pitch(&self) -> usize {
        self.columns + BANK_PADDING / 2
    }

    /// Values exchanged by the two units of a row through shared memory, where plane operations do
    /// not do it.
    pub(crate) fn exchange(&self) -> usize {
        match self.products {
            TileMultiplier::MatrixUnits => 1,
            TileMultiplier::Loops => self.units(),
        }
    }

    /// Vectors of a row of the output that a unit owns.
    pub(crate) fn vectors_per_unit(&self) -> usize {
        self.width / (2 * self.vector)
    }

    /// As many columns of the output as the scratch holds, from the `index`th on: the first one,
    /// and how many.
    pub(crate) fn chunk(&self, index: usize) -> [usize; 2] {
        let first = index * self.columns;
        [first, self.columns.min(self.width - first)]
    }

    /// How many [chunks](Self::chunk) the output has.
    pub(crate) fn chunks(&self) -> usize {
        self.width.div_ceil(self.columns)
    }

    /// Bytes of shared memory with `resident` resident tiles and two streamed ones.
    fn memory(&self, resident: usize) -> usize {
        let tiles = (resident * self.rows() + 2 * self.columns) * self.pitch();
        let weights = self.rows() * self.weight_pitch();
        // A second scratch, and statistics of the columns, are kept by one of the kernels only.
        let scratch = resident * self.rows() * self.scratch_pitch();
        let words = scratch + self.exchange() + 2 * self.columns;
        2 * (tiles + weights) + 4 * words
    }
}

/// The tiles of both directions for a device with this much shared memory for a cube.
pub(crate) fn blocks(
    width: usize,
    vector: usize,
    memory: usize,
    products: TileMultiplier,
) -> [MatrixTiles; 2] {
    let best = |sizes: &[[usize; 2]], resident: usize| {
        let blocks = |[planes, columns]: [usize; 2]| MatrixTiles {
            planes,
            columns,
            width,
            vector,
            products,
        };
        let mut all = sizes.iter().copied().map(blocks);
        let fits =
            |blocks: &MatrixTiles| blocks.memory(resident) <= memory.min(SHARED_MEMORY_TARGET);
        let smallest = blocks(sizes[sizes.len() - 1]);
        all.find(fits).unwrap_or(smallest)
    };
    [best(&FORWARD, 1), best(&BACKWARD, 2)]
}

/// A load, and the tiles of both directions, for tensors with the strides that the function is given.
pub(super) fn plan(
    products: TileMultiplier,
) -> impl FnOnce(&Client, &AttentionProblem, &[HeadStrides]) -> TilePlan<MatrixTiles> {
    move |client, problem, head_strides| {
        let width = problem.heads.width;
        let vector = vector(client, problem.dtype, width, head_strides, MAX_VECTOR);
        let memory = client.properties().hardware.max_shared_memory_size;
        let [forward, backward] = blocks(width, vector, memory, products);
        TilePlan {
            vector,
            forward,
            queries: backward,
            keys: backward,
        }
    }
}

/// What the device does not support of products of `dtype` with sums in f32.
pub(crate) fn missing_support(client: &Client, dtype: DType) -> Option<String> {
    let properties = client.properties();
    let kind = match dtype {
        DType::F16 => FloatKind::F16,
        DType::BF16 => FloatKind::BF16,
        other => return Some(format!("matrix units take F16 and BF16, not {other:?}")),
    };
    let wanted = MmaConfig {
        a_type: ElemType::Float(kind),
        b_type: ElemType::Float(kind),
        cd_type: ElemType::Float(FloatKind::F32),
        m: TILE as u32,
        n: TILE as u32,
        k: TILE as u32,
    };
    if !properties.features.matmul.cmma.contains(&wanted) {
        let message = "no 16x16x16 matrix products with sums in f32";
        return Some(format!("the device has {message} in {dtype:?}"));
    }
    let hardware = &properties.hardware;
    let planes = (hardware.plane_size_min, hardware.plane_size_max);
    if planes != (WARP_UNITS as u32, WARP_UNITS as u32) {
        let (least, most) = planes;
        return Some(format!(
            "planes of {least} to {most} units: expected {WARP_UNITS}"
        ));
    }
    let needed = [Plane::Ops, Plane::Sync];
    let missing = needed
        .into_iter()
        .find(|feature| !properties.features.plane.contains(*feature));
    missing.map(|feature| format!("the device has no plane operations {feature:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_of_every_width_fit_into_the_memory_of_the_smallest_device() {
        const SMALL: usize = 32 * 1024;
        for width in (TILE..=MAX_WIDTH).step_by(TILE) {
            for products in [TileMultiplier::MatrixUnits, TileMultiplier::Loops] {
                let [forward, backward] = blocks(width, 4, SMALL, products);
                assert!(forward.memory(1) <= SMALL, "{forward:?}");
                assert!(backward.memory(2) <= SMALL, "{backward:?}");
            }
        }
    }

    #[test]
    fn a_unit_owns_whole_vectors_of_every_chunk() {
        for width in (TILE..=MAX_WIDTH).step_by(TILE) {
            for vector in [1, 2, 4, 8] {
                for blocks in blocks(
                    width,
                    vector,
                    SHARED_MEMORY_TARGET,
                    TileMultiplier::MatrixUnits,
                ) {
                    let chunks = (0..blocks.chunks()).map(|index| blocks.chunk(index));
                    let [mut end, mut vectors_per_unit] = [0; 2];
                    for [first, columns] in chunks {
                        assert_eq!((first, columns % (2 * vector)), (end, 0), "{blocks:?}");
                        end += columns;
                        vectors_per_unit += columns / (2 * vector);
                    }
                    assert_eq!(
                        (end, vectors_per_unit),
                        (width, blocks.vectors_per_unit()),
                        "{blocks:?}"
                    );
                    assert_eq!(blocks.pitch() % vector, 0, "{blocks:?}");
                }
            }
        }
    }
}
