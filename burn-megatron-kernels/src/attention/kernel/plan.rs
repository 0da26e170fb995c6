//! The tile sizes of the kernels without tensor cores.

use burn::tensor::DType;
use cubecl::client::Client;

use super::super::ops::HeadStrides;
use super::super::problem::AttentionProblem;
use super::tile::{LANES, TileShape};
use crate::cube::RowPlan;

/// The shared memory per cube with which three cubes fit on a multiprocessor.
const SHARED_MEMORY_TARGET: usize = 64 * 1024;

/// The maximum number of elements per load. Tiles in shared memory are f32, so wider loads would not save shared
/// memory.
const MAX_VECTOR: usize = 4;

/// Candidates `[rows, columns, rows per unit]` for the tile sizes, best first. Each candidate needs fewer registers or
/// less memory than the previous candidate.
const FORWARD: [[usize; 3]; 6] = [
    [64, 64, 4],
    [64, 32, 4],
    [32, 32, 4],
    [32, 16, 4],
    [16, 8, 2],
    [8, 8, 1],
];
const BACKWARD: [[usize; 3]; 6] = [
    [64, 32, 2],
    [32, 32, 2],
    [32, 16, 2],
    [16, 16, 2],
    [16, 8, 2],
    [8, 8, 1],
];

/// The number of elements per load, and the tile sizes of each kernel.
#[derive(Clone, Debug)]
pub(super) struct TilePlan<T> {
    pub vector: usize,
    /// The number of elements per store, for gradients of keys and values in a flat buffer.
    pub flat_vector: usize,
    pub forward: T,
    /// The tile sizes for the gradient of the queries.
    pub queries: T,
    /// The tile sizes for the gradients of keys and values. Each element is a separate launch.
    pub keys: Vec<T>,
}

impl TilePlan<TileShape> {
    /// Creates a plan for tensors with these `head_strides`.
    pub(super) fn new(
        client: &Client,
        problem: &AttentionProblem,
        head_strides: &[HeadStrides],
    ) -> Self {
        let widths = [problem.heads.width, problem.value_width];
        let hardware = &client.properties().hardware;
        let row = RowPlan::new(client, problem.dtype, widths[0]);
        // The lanes of a row must be adjacent units of one plane.
        let planes = row.planes() && hardware.plane_size_min as usize >= LANES;
        let vector = vector(client, problem.dtype, widths, head_strides);
        let memory = hardware.max_shared_memory_size.min(SHARED_MEMORY_TARGET);
        let units = hardware.max_units_per_cube as usize;
        let shape = |sizes, resident| best(sizes, resident, widths, vector, planes, memory, units);
        let backward = shape(BACKWARD, 2);
        Self {
            vector,
            flat_vector: vector,
            forward: shape(FORWARD, 1),
            queries: backward,
            keys: vec![backward],
        }
    }
}

/// Returns the number of elements of the widest load that divides every row, up to [`MAX_VECTOR`].
fn vector(
    client: &Client,
    dtype: DType,
    widths: [usize; 2],
    head_strides: &[HeadStrides],
) -> usize {
    let fits = |size: usize| {
        let fits_strides = |strides: &HeadStrides| {
            let steps = [strides.offset, strides.batch, strides.row, strides.head];
            steps.iter().all(|step| step.is_multiple_of(size))
        };
        size <= MAX_VECTOR
            && widths.iter().all(|width| width.is_multiple_of(size))
            && head_strides.iter().all(fits_strides)
    };
    let mut sizes = client.io_optimized_vector_sizes(dtype.size());
    sizes.find(|size| fits(*size)).unwrap_or(1)
}

/// Returns the first element of `sizes` for which `resident` resident tiles fit into the memory of the device, for
/// heads with these key and value widths. The last element fits on every device.
fn best(
    sizes: [[usize; 3]; 6],
    resident: usize,
    [width, value_width]: [usize; 2],
    vector: usize,
    planes: bool,
    memory: usize,
    units: usize,
) -> TileShape {
    let shape = |[rows, columns, own]: [usize; 3]| TileShape {
        rows,
        columns,
        own,
        width: width / vector,
        value_width: value_width / vector,
        planes,
    };
    let fits = |shape: &TileShape| {
        let tiles = (resident * shape.rows + shape.columns) * shape.pitch() * vector;
        let kept = (resident - 1) * shape.kept();
        let words = tiles + shape.rows * shape.weight_pitch() + shape.exchange() + kept;
        words * size_of::<f32>() <= memory && shape.units() <= units
    };
    let last = shape(sizes[sizes.len() - 1]);
    sizes.into_iter().map(shape).find(fits).unwrap_or(last)
}

/// Returns the tile sizes of a large device. AOT instances use them.
pub(super) fn typical(width: usize, vector: usize) -> [TileShape; 2] {
    let shape = |sizes, resident| {
        best(
            sizes,
            resident,
            [width; 2],
            vector,
            true,
            SHARED_MEMORY_TARGET,
            1024,
        )
    };
    [shape(FORWARD, 1), shape(BACKWARD, 2)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_of_every_width_fit_into_the_memory_of_the_smallest_device() {
        const SMALL: usize = 32 * 1024;
        for width in 1..=super::super::super::problem::MAX_WIDTH {
            for vector in [1, 2, 4] {
                for (sizes, resident) in [(FORWARD, 1), (BACKWARD, 2)] {
                    if width % vector != 0 {
                        continue;
                    }
                    let shape = best(sizes, resident, [width; 2], vector, false, SMALL, 256);
                    let tiles = (resident * shape.rows + shape.columns) * shape.pitch() * vector;
                    let kept = (resident - 1) * shape.kept();
                    let words = tiles + shape.rows * shape.weight_pitch() + shape.exchange() + kept;
                    assert!(
                        words * 4 <= SMALL,
                        "width {width}, vector {vector}: {shape:?}"
                    );
                }
            }
        }
    }
}
