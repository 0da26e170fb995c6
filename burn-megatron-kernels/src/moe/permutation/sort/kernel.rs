//! The CubeCL kernels. They compute a histogram of each chunk, the running sums of the histograms, and the place of
//! each pair.
//!
//! A unit counts the pairs before its own pair in the chunk. Therefore the pairs keep their order and no atomic
//! operations are needed.

use burn::tensor::DType;
use burn_cubecl::ops::numeric::full_device_dtype;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::super::layout::LayoutSizes;
use super::{CHUNK, MAX_EXPERTS};
use crate::cube::instance::{AotList, instance};
use crate::cube::{empty, launch, matrix_sizes};
use crate::launch::exactly;

/// The number of units per cube.
const UNITS: u32 = 256;

/// Copies a chunk of indices to shared memory and returns its length. All units of the cube must call this function.
#[cube]
fn load_chunk(indices: &Tensor<i32>, chunk: &mut Shared<[i32]>, first: u32, end: u32) -> u32 {
    let length = min(end - first, comptime!(CHUNK as u32));
    let mut i = UNIT_POS;
    while i < length {
        chunk[i as usize] = indices[(first + i) as usize];
        i += UNITS;
    }
    sync_cube();
    length
}

/// Counts the pairs of one chunk per cube. `counts` is `[sequences * chunks, experts]`. A chunk ends at the end of a
/// sequence, which has `pairs` pairs.
#[cube(launch_unchecked)]
fn histogram_kernel(
    indices: &Tensor<i32>,
    counts: &mut Tensor<i32>,
    pairs: u32,
    chunks: u32,
    cubes: u32,
    experts: u32,
) {
    let mut shared = Shared::<[i32]>::new_slice(comptime!(CHUNK));
    let cube = CUBE_POS as u32;
    if cube < cubes {
        let start = cube / chunks * pairs;
        let first = start + cube % chunks * comptime!(CHUNK as u32);
        let length = load_chunk(indices, &mut shared, first, start + pairs);
        let mut expert = UNIT_POS;
        while expert < experts {
            let mut count = 0i32;
            for i in 0..length {
                count += select(shared[i as usize] == expert as i32, 1i32, 0i32);
            }
            counts[(cube * experts + expert) as usize] = count;
            expert += UNITS;
        }
    }
}

/// A layout as kernel arguments. See [`LayoutSizes`]. A negative capacity means that there is no capacity.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    align: i32,
    capacity: i32,
    limit: i32,
}

crate::cube::instance::default_fields!(SizesCompilationArg [align capacity limit]);

impl Sizes {
    fn launch(sizes: &LayoutSizes) -> SizesLaunch {
        let capacity = sizes.capacity.map_or(-1, |rows| rows as i32);
        SizesLaunch::new(sizes.align as i32, capacity, sizes.limit as i32)
    }
}

/// Returns the number of rows of a group with `pairs` pairs, before the limit is applied.
#[cube]
fn group_rows(sizes: &Sizes, pairs: i32) -> i32 {
    let aligned = (pairs + sizes.align - 1) / sizes.align * sizes.align;
    select(sizes.capacity < 0, aligned, sizes.capacity)
}

/// Replaces the counts of the chunks by the counts before each chunk, and computes the total counts and the offsets. It
/// runs on one cube.
#[cube(launch_unchecked)]
fn scan_kernel(
    before: &mut Tensor<i32>,
    counts: &mut Tensor<i32>,
    offsets: &mut Tensor<i32>,
    sizes: &Sizes,
    chunks: u32,
    experts: u32,
) {
    let mut totals = Shared::<[i32]>::new_slice(comptime!(MAX_EXPERTS));
    let mut expert = UNIT_POS;
    while expert < experts {
        let mut total = 0i32;
        for chunk in 0..chunks {
            let at = (chunk * experts + expert) as usize;
            let count = before[at];
            before[at] = total;
            total += count;
        }
        totals[expert as usize] = total;
        expert += UNITS;
    }
    sync_cube();
    let mut expert = UNIT_POS;
    while expert <= experts {
        let mut start = 0i32;
        for other in 0..expert {
            start = min(
                start + group_rows(sizes, totals[other as usize]),
                sizes.limit,
            );
        }
        offsets[expert as usize] = start;
        if expert < experts {
            let total = totals[expert as usize];
            let end = min(start + group_rows(sizes, total), sizes.limit);
            counts[expert as usize] = min(total, end - start);
        }
        expert += UNITS;
    }
}

/// Places the pairs of one chunk per cube.
#[cube(launch_unchecked)]
fn place_kernel(
    indices: &Tensor<i32>,
    before: &Tensor<i32>,
    offsets: &Tensor<i32>,
    row_to_pair: &mut Tensor<i32>,
    pair_to_row: &mut Tensor<i32>,
    pairs: u32,
    chunks: u32,
    experts: u32,
) {
    let mut shared = Shared::<[i32]>::new_slice(comptime!(CHUNK));
    let chunk = CUBE_POS as u32;
    if chunk < chunks {
        let first = chunk * comptime!(CHUNK as u32);
        let length = load_chunk(indices, &mut shared, first, pairs);
        let mut i = UNIT_POS;
        while i < length {
            let expert = shared[i as usize];
            let mut row = (-1i32).runtime();
            if expert >= 0i32 && expert < experts as i32 {
                let mut at = offsets[expert as usize];
                at += before[(chunk * experts) as usize + expert as usize];
                for other in 0..i {
                    at += select(shared[other as usize] == expert, 1i32, 0i32);
                }
                if at < offsets[expert as usize + 1] {
                    row = at;
                    row_to_pair[at as usize] = (first + i) as i32;
                }
            }
            pair_to_row[(first + i) as usize] = row;
            i += UNITS;
        }
    }
}

/// Returns the counts of the chunks, `[sequences * chunks, experts]`, and the number of chunks per sequence.
pub(in crate::moe) fn histogram(
    indices: &CubeTensor,
    experts: usize,
    sequences: usize,
) -> (CubeTensor, usize) {
    let client = indices.client.clone();
    let pairs = indices.meta.shape().num_elements() / sequences;
    let chunks = pairs.div_ceil(CHUNK);
    let cubes = sequences * chunks;
    let counts = empty(indices, [cubes, experts], DType::I32);
    // SAFETY: units past a chunk or the experts access no memory.
    unsafe {
        launch!(
            histogram_kernel,
            [client, cubes, UNITS],
            [],
            [indices, &counts],
            (pairs as u32, chunks as u32, cubes as u32, experts as u32)
        );
    }
    (counts, chunks)
}

/// Counts the pairs. See [`count`](super::count).
pub(super) fn count(experts: usize, sizes: &LayoutSizes, indices: CubeTensor) -> Vec<CubeTensor> {
    let client = indices.client.clone();
    let (before, chunks) = histogram(&indices, experts, 1);
    let counts = empty(&indices, [experts], DType::I32);
    let offsets = empty(&indices, [experts + 1], DType::I32);
    // SAFETY: units past the experts access no memory.
    unsafe {
        launch!(
            scan_kernel,
            [client, 1, UNITS],
            [],
            [&before, &counts, &offsets],
            (Sizes::launch(sizes), chunks as u32, experts as u32)
        );
    }
    vec![before, counts, offsets]
}

/// Places the pairs. See [`place`](super::place). `fills` is true if each row has a pair.
pub(super) fn place(rows: usize, fills: bool, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
    let [indices, before, offsets] = exactly(inputs);
    let client = indices.client.clone();
    let (shape, [chunks, experts]) = (indices.meta.shape().clone(), matrix_sizes(&before));
    let pair_to_row = empty(&indices, shape.clone(), DType::I32);
    let row_to_pair = if fills || rows == 0 {
        // If there are no rows, the kernel still needs memory.
        empty(&indices, [rows.max(1)], DType::I32)
    } else {
        let (device, element) = (indices.device.clone(), i32::elem_type_native());
        let fill = InputScalar::new(-1i32, element);
        full_device_dtype(client.clone(), [rows].into(), device, fill, DType::I32)
    };
    // SAFETY: the row of a pair is below the offset of the next expert, which is at most the number
    // of rows.
    unsafe {
        launch!(
            place_kernel,
            [client, chunks, UNITS],
            [],
            [indices, before, offsets, &row_to_pair, &pair_to_row],
            (shape.num_elements() as u32, chunks as u32, experts as u32)
        );
    }
    let row_to_pair = match rows {
        0 => empty(&row_to_pair, [0], DType::I32),
        _ => row_to_pair,
    };
    vec![row_to_pair, pair_to_row]
}

/// Adds one AOT instance of each kernel. The instances do not depend on sizes.
pub(crate) fn aot_instances(list: &mut AotList) {
    instance!(
        list.other("moe/histogram"), UNITS,
        histogram_kernel::HistogramKernel [_ _ _ _ _ _] ()
    );
    instance!(list.other("moe/scan"), UNITS, scan_kernel::ScanKernel [_ _ _ _ _ _] ());
    instance!(list.other("moe/place"), UNITS, place_kernel::PlaceKernel [_ _ _ _ _ _ _ _] ());
}
