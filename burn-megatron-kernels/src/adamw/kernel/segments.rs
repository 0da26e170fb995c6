//! Sums of squares of segments, computed in two launches. The first launch computes one sum per chunk, the second
//! launch one sum per segment.

use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use crate::adamw::segments::CHUNK;
use crate::cube::instance::{AotList, instance, types};
use crate::cube::{RowPlan, cube_sum, empty, lane_sum, launch, own};
use crate::launch::exactly;

/// The number of units per cube.
const UNITS: u32 = 256;

/// Computes the sum of squares of each chunk. `table` holds the start and the end of each chunk.
#[cube(launch_unchecked)]
fn chunks_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    table: &[u32],
    sums: &mut [f32],
    chunks: u32,
    #[comptime] vectors: u32,
    #[comptime] planes: bool,
    #[define(F)] _dtype: ElemType,
) {
    let chunk = CUBE_POS;
    if chunk < chunks as usize {
        let start = table[2 * chunk] as usize / N::value();
        let end = (table[2 * chunk + 1] as usize + N::value() - 1) / N::value();
        let mut sum = Vector::<f32, N>::new(0.0);
        #[unroll]
        for i in 0..vectors {
            let at = start + (i * UNITS + UNIT_POS) as usize;
            if at < end {
                let value = Vector::<f32, N>::cast_from(x[at]);
                sum += value * value;
            }
        }
        let total = cube_sum(lane_sum(sum), UNITS, planes);
        if UNIT_POS == 0 {
            sums[chunk] = total;
        }
    }
}

/// Updates the results with one cube per segment, and one cube for the complete buffer.
///
/// From element `2 * chunks` on, `table` holds the number of chunks before each segment.
#[cube(launch_unchecked)]
fn largest_kernel(
    sums: &[f32],
    table: &[u32],
    largest: &mut [f32],
    chunks: u32,
    segments: u32,
    first: u32,
    #[comptime] planes: bool,
) {
    let segment = CUBE_POS as u32;
    if segment <= segments {
        let mut at = 0u32;
        let mut end = chunks;
        let mut result = 0u32;
        if segment < segments {
            at = table[(2 * chunks + segment) as usize];
            end = table[(2 * chunks + segment + 1) as usize];
            result = first + segment;
        }
        at += UNIT_POS;
        let mut sum = 0.0f32;
        while at < end {
            sum += sums[at as usize];
            at += UNITS;
        }
        let total = cube_sum(sum, UNITS, planes);
        if UNIT_POS == 0 {
            // Non-negative floats have the same order as their bits, and NaN is the largest.
            let before = u32::reinterpret(largest[result as usize]);
            let found = u32::reinterpret(total);
            largest[result as usize] = f32::reinterpret(max(before, found));
        }
    }
}

/// Computes the updated results. The inputs are the previous results, the buffer, and the table of
/// [`Segments`](crate::adamw::Segments).
pub(in crate::adamw) fn largest_sums(
    inputs: Vec<CubeTensor>,
    chunks: usize,
    segments: usize,
    first: usize,
) -> CubeTensor {
    let [largest, x, table] = exactly(inputs);
    let largest = own(largest);
    let client = x.client.clone();
    let plan = RowPlan::new(&client, x.dtype, x.shape().num_elements());
    let planes = plan.planes();
    let sums = empty(&x, [chunks], DType::F32);
    let dtype = dtype_to_storage_type(x.dtype);
    unsafe {
        launch!(
            chunks_kernel,
            [client, chunks, UNITS],
            [plan.vector],
            [x, &table, &sums],
            (chunks as u32),
            (vectors(plan.vector), planes, dtype)
        );
        launch!(
            largest_kernel,
            [client, segments + 1, UNITS],
            [],
            [sums, table, &largest],
            (chunks as u32, segments as u32, first as u32),
            (planes)
        );
    }
    largest
}

/// Returns the number of vectors of a chunk that each unit processes.
fn vectors(vector: usize) -> u32 {
    (CHUNK / vector) as u32 / UNITS
}

pub(super) fn aot_instances(list: &mut AotList) {
    for (name, dtype, vector) in types() {
        instance!(
            list.streaming("largest_sums_of_squares/{name}"), UNITS,
            chunks_kernel::ChunksKernel [_ _ _ _] (vector, vectors(vector), true, dtype)
        );
    }
    instance!(
        list.other("largest_sums_of_squares/segments"), UNITS,
        largest_kernel::LargestKernel [_ _ _ _ _ _] (true)
    );
}
