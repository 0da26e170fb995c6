//! The kernel for the weight gradients of all experts, which writes to a flat f32 buffer.

use cubecl::prelude::*;

use super::plan::{Factors, TILE, WARP_TILE};
use super::sums::{FRAGMENTS, Part, sum_products, warp_column, warp_row};
use crate::cube::mma::CHUNK;
use crate::cube::mma::ptx::{Quad, shared_address};
use crate::cube::mma::swizzle::{lane_column, lane_row};

/// Computes `dw_e = x_e^T dy_e`, expert by expert and row by row, starting at element `offset` of `flat`. If `add` is
/// true, the kernel adds to the existing elements, otherwise it overwrites them.
///
/// One cube computes [`TILE`] by [`TILE`] weights of one entry of [`summed_rows`](super::plan::summed_rows). Sizes are
/// in elements. `offset` is in vectors of `flat`.
#[cube(launch_unchecked)]
pub(crate) fn grouped_weight_gradient<F: Float, N: Size, M: Size>(
    x: &[Vector<F, N>],
    gradient: &[Vector<F, N>],
    summed_rows: &[i32],
    flat: &mut [Vector<f32, M>],
    experts: u32,
    inputs: u32,
    outputs: u32,
    offset: u32,
    #[comptime] add: bool,
    #[comptime] factors: Factors,
    #[define(F)] _dtype: ElemType,
) {
    let down = inputs.div_ceil(comptime!(TILE as u32)) as usize;
    let across = outputs.div_ceil(comptime!(TILE as u32)) as usize;
    let cube = CUBE_POS;
    if cube < experts as usize * down * across {
        let entry = cube / (down * across) * 3;
        let expert = summed_rows[entry] as usize;
        let first = summed_rows[entry + 1] as usize;
        let depth = summed_rows[entry + 2] as u32 - first as u32;
        let row = (cube / across % down) as u32 * comptime!(TILE as u32);
        let column = (cube % across) as u32 * comptime!(TILE as u32);
        let left = part(first, row, inputs);
        let right = part(first, column, outputs);
        let memory = Shared::<[Vector<u32, Quad>]>::new_aligned_slice(
            comptime!(factors.memory() / 16),
            128usize,
        );
        let memory = shared_address(&memory[0usize..1usize]);
        let row = row + warp_row() * comptime!(WARP_TILE as u32);
        let column = column + warp_column() * comptime!(WARP_TILE as u32);
        let needed = row < inputs && column < outputs;
        let sums = sum_products(x, gradient, &left, &right, depth, memory, needed, factors);
        let width = outputs as usize / M::value();
        let start = offset as usize + expert * inputs as usize * width;
        store(&sums, flat, start, row, inputs, column, outputs, add);
    }
}

/// Returns the part of a matrix that starts at row `first` and column `column`. The matrix has `columns` columns.
#[cube]
fn part(first: usize, column: u32, columns: u32) -> Part {
    let stride = columns as usize / CHUNK;
    Part {
        start: first * stride + column as usize / CHUNK,
        stride,
        across: (columns - column) / comptime!(CHUNK as u32),
    }
}

/// Stores this warp's part of the weight gradient of an expert, whose elements begin at `start`. The part starts at
/// `row` and `column`. The four lanes of a row write 32 adjacent bytes.
#[cube]
fn store<M: Size>(
    sums: &Array<Vector<f32, Quad>>,
    flat: &mut [Vector<f32, M>],
    start: usize,
    row: u32,
    rows: u32,
    column: u32,
    columns: u32,
    #[comptime] add: bool,
) {
    let size = M::value().comptime();
    let width = columns as usize / size;
    #[unroll]
    for index in 0..comptime!(2 * FRAGMENTS) {
        let line = row + lane_row(index);
        if line < rows {
            let start = start + line as usize * width;
            #[unroll]
            for tile in 0..comptime!(2 * FRAGMENTS) {
                let at = column + lane_column() + comptime!((8 * tile) as u32);
                let sum = sums[comptime!(index / 2 * 2 * FRAGMENTS + tile)];
                if at < columns {
                    let at = start + at as usize / size;
                    #[unroll]
                    for vector in 0..comptime!(2 / size) {
                        let mut value = Vector::<f32, M>::new(0.0f32);
                        #[unroll]
                        for lane in 0..size {
                            let element = comptime!(index % 2 * 2 + vector * size + lane);
                            value.insert(lane, sum.extract(element));
                        }
                        if comptime!(add) {
                            value += flat[at + vector];
                        }
                        flat[at + vector] = value;
                    }
                }
            }
        }
    }
}
