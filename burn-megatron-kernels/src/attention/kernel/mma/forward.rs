//! The forward kernel, which computes the output, the log-sum-exp and the largest score. It keeps a tile of queries in
//! shared memory (the resident tile) and streams tiles of keys and values.

use cubecl::prelude::*;

use super::super::forward::{MASKED_SCORE, with_sink};
use super::super::tile::{AttentionSizes, AttentionStrides, block, block_count, head_rows};
use super::plan::{LOG2_E, MmaShape};
use super::tile::{KeyStages, accumulate, copy_tile, products, resident, store, tile_memory};
use super::visible::{mask, visible_columns};
use crate::cube::mma::WARP;
use crate::cube::mma::ptx::{Quad, commit_copies, exp2, wait_for_copies};
use crate::cube::mma::swizzle::lane_row;

/// Computes the output for `shape.rows()` queries of one head per cube, and for `shape.warp_rows()` of these queries
/// per warp.
///
/// The cubes with the last queries come first, because with causal attention they have the most keys. While a tile of
/// keys and values is processed, the next tile is copied. The softmax uses powers of 2 instead of `e`, so the factor of
/// the scores contains `log2(e)`.
#[cube(launch_unchecked)]
pub(crate) fn mma_forward<F: Float, N: Size>(
    q: &[Vector<F, N>],
    k: &[Vector<F, N>],
    v: &[Vector<F, N>],
    sink: &ComptimeOption<OwnedTensor<f32>>,
    bounds: &ComptimeOption<OwnedTensor<i32>>,
    out: &mut [Vector<F, N>],
    lse: &mut [f32],
    strides: &AttentionStrides,
    sizes: &AttentionSizes,
    #[comptime] shape: MmaShape,
    #[comptime] with_max: bool,
    #[define(F)] _dtype: ElemType,
) {
    let values = comptime!(shape.of_values());
    let rows = comptime!(shape.rows());
    let columns = comptime!(shape.columns);
    let heads = sizes.heads as usize;
    if CUBE_POS < block_count(sizes, heads, rows) {
        let block = block(sizes, heads, bounds, true, rows);
        let (batch, head, first) = (block.batch, block.head, block.first);
        let queries = sizes.mask_range.rows as usize;
        let q_rows = head_rows(&strides.q, batch, head, queries);

        let query_tile = tile_memory(shape);
        let stages = query_tile + comptime!(shape.bytes(rows) as u32);
        let streamed = KeyStages::new(k, v, strides, &block, sizes, stages, shape);
        let stage_bytes = comptime!(shape.stage() as u32);

        let mut at = block.start;
        copy_tile(q, &q_rows, first, query_tile, rows, shape);
        commit_copies();
        if at < block.end {
            streamed.copy(at, 0u32);
        }
        commit_copies();
        wait_for_copies(1usize);
        sync_cube();
        let q_resident = resident(query_tile, shape);
        let own = first + (UNIT_POS as usize / WARP) * comptime!(shape.warp_rows());
        let visible = visible_columns(own, sizes, bounds, shape);

        let scale = sizes.scale * LOG2_E;
        let mut sums = Array::<Vector<f32, Quad>>::new(comptime!(values.sum_tiles()));
        let mut largest = Array::<f32>::new(comptime!(2 * shape.row_tiles));
        let mut totals = Array::<f32>::new(comptime!(2 * shape.row_tiles));
        #[unroll]
        for row in 0..2 * shape.row_tiles {
            largest[row] = minus_infinity();
        }
        let mut stage = 0u32;
        while at < block.end {
            wait_for_copies(0usize);
            sync_cube();
            let next = at + columns as i32;
            if next < block.end {
                streamed.copy(next, stage_bytes - stage);
            }
            commit_copies();
            if visible.some(at, columns) {
                let mut scores = products(&q_resident, streamed.key_tile(stage), shape);
                if !visible.all(at, columns) {
                    mask(&mut scores, minus_infinity(), own, at, sizes, bounds, shape);
                }
                softmax(
                    &mut scores,
                    &mut sums,
                    &mut largest,
                    &mut totals,
                    scale,
                    values,
                );
                accumulate(&mut sums, &scores, streamed.value_tile(stage), values);
            }
            stage = stage_bytes - stage;
            at = next;
        }

        let mut factors = Array::<f32>::new(comptime!(2 * shape.row_tiles));
        #[unroll]
        for row in 0..2 * shape.row_tiles {
            let mut total = totals[row];
            total += plane_shuffle_xor(total, 1u32);
            total += plane_shuffle_xor(total, 2u32);
            let seen = largest[row] > minus_infinity();
            let own_most = select(seen, largest[row] * sizes.scale, MASKED_SCORE);
            let (factor, most, total) = with_sink(own_most, total, sink, head);
            factors[row] = factor;
            let query = own + lane_row(row) as usize;
            if UNIT_POS & 3 == 0 && query < queries {
                let at = (batch * heads + head) * queries + query;
                lse[at] = most + total.ln();
                if comptime!(with_max) {
                    lse[sizes.batches as usize * heads * queries + at] = own_most;
                }
            }
        }
        let out_rows = head_rows(&strides.out, batch, head, queries);
        let start = q_resident.start;
        store(&sums, &factors, start, out, &out_rows, own, values);
    }
}

/// Converts the scores of a tile to weights relative to the largest score so far, and rescales the existing sums to
/// this score.
#[cube]
fn softmax(
    scores: &mut Array<Vector<f32, Quad>>,
    sums: &mut Array<Vector<f32, Quad>>,
    largest: &mut Array<f32>,
    totals: &mut Array<f32>,
    scale: f32,
    #[comptime] shape: MmaShape,
) {
    let across = comptime!(shape.columns / 8);
    let features = comptime!(shape.width / 8);
    #[unroll]
    for row in 0..2 * shape.row_tiles {
        let a = comptime!(row % 2 * 2);
        let b = comptime!(row % 2 * 2 + 1);
        let mut most = largest[row];
        #[unroll]
        for tile in 0..across {
            let score = scores[comptime!(row / 2 * across + tile)];
            most = max(most, max(score.extract(a), score.extract(b)));
        }
        most = max(most, plane_shuffle_xor(most, 1u32));
        most = max(most, plane_shuffle_xor(most, 2u32));
        // The weights of a row stay 0 until a key is visible.
        let offset = select(most > minus_infinity(), most, 0.0f32) * scale;
        let factor = exp2(fma(largest[row], scale, -offset));
        largest[row] = most;
        let mut total = totals[row] * factor;
        #[unroll]
        for tile in 0..across {
            let index = comptime!(row / 2 * across + tile);
            let mut score = scores[index];
            let first = exp2(fma(score.extract(a), scale, -offset));
            let second = exp2(fma(score.extract(b), scale, -offset));
            total += first + second;
            score.insert(a, first);
            score.insert(b, second);
            scores[index] = score;
        }
        totals[row] = total;
        #[unroll]
        for feature in 0..features {
            let index = comptime!(row / 2 * features + feature);
            let mut sum = sums[index];
            sum.insert(a, sum.extract(a) * factor);
            sum.insert(b, sum.extract(b) * factor);
            sums[index] = sum;
        }
    }
}

/// Returns minus infinity, which is below every score.
#[cube]
fn minus_infinity() -> f32 {
    f32::reinterpret(0xff80_0000u32)
}
