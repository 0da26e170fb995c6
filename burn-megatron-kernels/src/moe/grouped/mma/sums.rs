//! Computes the sums of a tile of the result. `cp.async` copies the next tiles of both operands while the previous
//! tiles are multiplied.

use cubecl::prelude::*;

use super::plan::{DEPTH, Factor, Factors, STAGES, UNITS, WARP_TILE, WARPS};
use crate::cube::mma::ptx::{Quad, commit_copies, copy_16_bytes, multiply, wait_for_copies};
use crate::cube::mma::swizzle::{Swizzle, column_lane, fragment, permutation, row_lane};
use crate::cube::mma::{CHUNK, CHUNK_BYTES, WARP};

/// The number of 16-row (or 16-column) fragments in a warp's part of the result.
pub(super) const FRAGMENTS: usize = WARP_TILE / 16;

/// The number of 16 by 8 tiles in a warp's part of the result, in row-major order.
pub(super) const SUMS: usize = FRAGMENTS * 2 * FRAGMENTS;

/// The part of an operand that a cube reads, in chunks of 16 bytes.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Part {
    /// The first chunk.
    pub start: usize,
    /// The stride between rows.
    pub stride: usize,
    /// The size of the dimension that is not summed, in rows. If rows are summed, it is in chunks.
    pub across: u32,
}

/// Returns the row index of this warp in the grid of the cube's warps.
#[cube]
pub(super) fn warp_row() -> u32 {
    UNIT_POS / comptime!((WARPS * WARP) as u32)
}

/// Returns the column index of this warp in the grid of the cube's warps.
#[cube]
pub(super) fn warp_column() -> u32 {
    UNIT_POS / comptime!(WARP as u32) % comptime!(WARPS as u32)
}

/// Returns the sums of this warp's part of the result over `depth` terms, in the order of the terms. `memory` is the
/// start of shared memory. `needed` is true if this warp's part overlaps the result.
#[cube]
pub(super) fn sum_products<F: Float, N: Size>(
    left: &[Vector<F, N>],
    right: &[Vector<F, N>],
    left_part: &Part,
    right_part: &Part,
    depth: u32,
    memory: u32,
    needed: bool,
    #[comptime] factors: Factors,
) -> Array<Vector<f32, Quad>> {
    let stage = comptime!(factors.stage() as u32);
    let steps = depth.div_ceil(comptime!(DEPTH as u32));
    #[unroll]
    for step in 0..comptime!(STAGES - 1) {
        let to = memory + comptime!(step as u32) * stage;
        let step = comptime!(step as u32).runtime();
        copy_step(left, right, left_part, right_part, depth, step, to, factors);
        commit_copies();
    }
    let mut sums = Array::<Vector<f32, Quad>>::new(SUMS);
    let mut ready = memory;
    let mut free = memory + comptime!((STAGES - 1) as u32) * stage;
    let end = memory + comptime!(STAGES as u32) * stage;
    for step in 0..steps {
        wait_for_copies(comptime!(STAGES - 2));
        sync_cube();
        let next = step + comptime!((STAGES - 1) as u32);
        copy_step(
            left, right, left_part, right_part, depth, next, free, factors,
        );
        commit_copies();
        if needed {
            multiply_step(&mut sums, ready, factors);
        }
        free = ready;
        ready += stage;
        if ready == end {
            ready = memory;
        }
    }
    sums
}

/// Starts to copy the terms of step `step` of both operands to shared memory. Does nothing if there is no such step.
#[cube]
fn copy_step<F: Float, N: Size>(
    left: &[Vector<F, N>],
    right: &[Vector<F, N>],
    left_part: &Part,
    right_part: &Part,
    depth: u32,
    step: u32,
    to: u32,
    #[comptime] factors: Factors,
) {
    let first = step * comptime!(DEPTH as u32);
    if first < depth {
        copy_tile(left, left_part, first, depth, to, factors.left);
        let to = to + comptime!(factors.left.bytes() as u32);
        copy_tile(right, right_part, first, depth, to, factors.right);
    }
}

/// Starts to copy the terms of an operand, starting at term `first`. Terms after the last term, and elements outside of
/// the result, become zeros.
#[cube]
fn copy_tile<F: Float, N: Size>(
    from: &[Vector<F, N>],
    part: &Part,
    first: u32,
    depth: u32,
    to: u32,
    #[comptime] factor: Factor,
) {
    let swizzle = comptime!(factor.swizzle());
    let group = comptime!(swizzle.group());
    let pass = comptime!(UNITS / group);
    let row = UNIT_POS / comptime!(group as u32);
    let column = UNIT_POS % comptime!(group as u32);
    let mut start = part.start + row as usize * part.stride + column as usize;
    let mut rows = part.across;
    let mut chunks = part.across;
    if comptime!(factor.by_depth) {
        start += first as usize * part.stride;
        rows = depth - first;
    } else {
        start += first as usize / CHUNK;
        chunks = (depth - first) / comptime!(CHUNK as u32);
    }
    let place = row * comptime!(swizzle.chunks as u32) + (column ^ permutation(row, swizzle));
    let to = to + place * comptime!(CHUNK_BYTES as u32);
    #[unroll]
    for index in 0..comptime!(factor.rows() / pass) {
        let is_row = row + comptime!((index * pass) as u32) < rows;
        let start = start + comptime!(index * pass) * part.stride;
        let to = to + comptime!(swizzle.bytes(index * pass) as u32);
        #[unroll]
        for of_row in 0..comptime!(swizzle.chunks / group) {
            let is_there = is_row && column + comptime!((of_row * group) as u32) < chunks;
            let chunk = start + comptime!(of_row * group);
            copy_16_bytes(
                &from[chunk..chunk + 1],
                to + comptime!((of_row * group * CHUNK_BYTES) as u32),
                select(is_there, comptime!(CHUNK_BYTES as u32), 0u32),
            );
        }
    }
}

/// Multiplies this warp's parts of the tiles at `stage` and adds the result to the sums.
#[cube]
fn multiply_step(sums: &mut Array<Vector<f32, Quad>>, stage: u32, #[comptime] factors: Factors) {
    let left = stage + warp_row() * comptime!(factors.left.warp_bytes() as u32);
    let right = stage
        + comptime!(factors.left.bytes() as u32)
        + warp_column() * comptime!(factors.right.warp_bytes() as u32);
    let left = lane(
        left,
        comptime!(factors.left.by_depth),
        comptime!(factors.left.swizzle()),
    );
    let right = lane(
        right,
        comptime!(!factors.right.by_depth),
        comptime!(factors.right.swizzle()),
    );
    #[unroll]
    for step in 0..comptime!(DEPTH / 16) {
        let mut rows = Array::<Vector<u32, Quad>>::new(FRAGMENTS);
        #[unroll]
        for row in 0..FRAGMENTS {
            rows[row] = part(left, row, step, factors.left);
        }
        #[unroll]
        for pair in 0..FRAGMENTS {
            let columns = part(right, pair, step, factors.right);
            #[unroll]
            for row in 0..FRAGMENTS {
                #[unroll]
                for half in 0..2usize {
                    let at = comptime!((row * FRAGMENTS + pair) * 2 + half);
                    sums[at] = multiply(rows[row], columns, half, sums[at], factors.bf16);
                }
            }
        }
    }
}

/// Returns the address from which this lane reads the fragments of a tile. `by_columns` is true for a left operand
/// whose rows are summed, and for a right operand whose rows are not summed.
#[cube]
fn lane(tile: u32, #[comptime] by_columns: bool, #[comptime] swizzle: Swizzle) -> u32 {
    if comptime!(by_columns) {
        column_lane(tile, swizzle)
    } else {
        row_lane(tile, swizzle)
    }
}

/// Returns the fragment with index `index` along the rows (or columns) and index `step` along the terms.
#[cube]
fn part(
    lane: u32,
    #[comptime] index: usize,
    #[comptime] step: usize,
    #[comptime] factor: Factor,
) -> Vector<u32, Quad> {
    let swizzle = comptime!(factor.swizzle());
    if comptime!(factor.by_depth) {
        fragment(lane, comptime!(16 * step), index, true, swizzle)
    } else {
        fragment(lane, comptime!(16 * index), step, false, swizzle)
    }
}
