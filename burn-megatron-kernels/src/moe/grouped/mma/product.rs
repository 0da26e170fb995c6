//! The kernel that multiplies the rows of all experts by their weights.

use cubecl::prelude::*;

use super::plan::{Factors, TILE, WARP_TILE};
use super::sums::{FRAGMENTS, Part, sum_products, warp_column, warp_row};
use crate::cube::mma::ptx::{
    Quad, load_shared, pack, shared_address, store_shared, wait_for_copies,
};
use crate::cube::mma::swizzle::{Swizzle, lane_column, lane_row, permutation};
use crate::cube::mma::{CHUNK, CHUNK_BYTES, WARP};

/// The layout of a warp's part of the result in shared memory.
const STORED: Swizzle = Swizzle {
    chunks: WARP_TILE / CHUNK,
};

/// Computes `y_e = x_e w_e`. One cube computes a tile of the result with the rows of one entry of
/// [`row_tiles`](super::plan::row_tiles) and [`TILE`] columns.
///
/// Cubes with the same rows are adjacent, so that concurrent cubes share weights and rows in the cache. Strides are in
/// chunks of 16 bytes, and sizes are in elements.
#[cube(launch_unchecked)]
pub(crate) fn grouped_product<F: Float, N: Size>(
    x: &[Vector<F, N>],
    weights: &[Vector<F, N>],
    row_tiles: &[i32],
    y: &mut [Vector<F, N>],
    x_stride: u32,
    weight_stride: u32,
    expert_stride: u32,
    tiles: u32,
    depth: u32,
    columns: u32,
    #[comptime] factors: Factors,
    #[define(F)] _dtype: ElemType,
) {
    let across = columns.div_ceil(comptime!(TILE as u32)) as usize;
    let cube = CUBE_POS;
    if cube < tiles as usize * across {
        let tile = cube / across * 3;
        let expert = row_tiles[tile] as usize;
        let first = row_tiles[tile + 1] as u32;
        let end = row_tiles[tile + 2] as u32;
        let column = (cube % across) as u32 * comptime!(TILE as u32);
        let left = Part {
            start: first as usize * x_stride as usize,
            stride: x_stride as usize,
            across: end - first,
        };
        let stride = weight_stride as usize;
        let mut start = expert * expert_stride as usize;
        let mut count = columns - column;
        if comptime!(factors.right.by_depth) {
            start += column as usize / CHUNK;
            count /= comptime!(CHUNK as u32);
        } else {
            start += column as usize * stride;
        }
        let right = Part {
            start,
            stride,
            across: count,
        };
        let memory = Shared::<[Vector<u32, Quad>]>::new_aligned_slice(
            comptime!(factors.memory() / 16),
            128usize,
        );
        let memory = shared_address(&memory[0usize..1usize]);
        let row = first + warp_row() * comptime!(WARP_TILE as u32);
        let column = column + warp_column() * comptime!(WARP_TILE as u32);
        let needed = row < end && column < columns;
        let sums = sum_products(x, weights, &left, &right, depth, memory, needed, factors);
        // The tiles of the operands are not read after this point.
        wait_for_copies(0usize);
        sync_cube();
        let warp = UNIT_POS / comptime!(WARP as u32);
        let own = memory + warp * comptime!(STORED.bytes(WARP_TILE) as u32);
        if needed {
            store(&sums, own, y, row, end, column, columns, factors.bf16);
        }
    }
}

/// Stores this warp's part of the result, starting at `row` and `column`. The part is first written to the warp's
/// shared memory, so that 16 bytes can be stored at a time.
#[cube]
fn store<F: Float, N: Size>(
    sums: &Array<Vector<f32, Quad>>,
    own: u32,
    y: &mut [Vector<F, N>],
    row: u32,
    end: u32,
    column: u32,
    columns: u32,
    #[comptime] bf16: bool,
) {
    let pitch = comptime!(STORED.bytes(1) as u32);
    #[unroll]
    for index in 0..comptime!(2 * FRAGMENTS) {
        let line = lane_row(index);
        let a = comptime!(index % 2 * 2);
        #[unroll]
        for chunk in 0..STORED.chunks {
            let tile = sums[comptime!(index / 2 * 2 * FRAGMENTS + chunk)];
            let value = pack(tile.extract(a), tile.extract(comptime!(a + 1)), bf16);
            let place = comptime!(chunk as u32) ^ permutation(line % 8, STORED);
            store_shared(
                own + line * pitch + place * comptime!(CHUNK_BYTES as u32) + lane_column() * 2,
                value,
            );
        }
    }
    sync_plane();
    let lane = UNIT_POS % comptime!(WARP as u32);
    let chunk = lane % comptime!(STORED.chunks as u32);
    let first = lane / comptime!(STORED.chunks as u32);
    let rows = comptime!(WARP / STORED.chunks);
    let width = columns / comptime!(CHUNK as u32);
    let at = column / comptime!(CHUNK as u32) + chunk;
    if at < width {
        #[unroll]
        for part in 0..comptime!(WARP_TILE / rows) {
            let line = first + comptime!((part * rows) as u32);
            if row + line < end {
                let place = chunk ^ permutation(line % 8, STORED);
                let from = own + line * pitch + place * comptime!(CHUNK_BYTES as u32);
                let to = (row + line) as usize * width as usize + at as usize;
                y[to] = Vector::<F, N>::reinterpret(load_shared(from));
            }
        }
    }
}
