//! The kernel for the gradient of the queries. It keeps a tile of queries and of the gradient of the output in shared
//! memory and streams tiles of keys and values.

use cubecl::prelude::*;

use super::super::tile::{
    AttentionSizes, AttentionStrides, DeviceStrides, block, block_count, filled, head_rows,
};
use super::plan::{LOG2_E, MmaShape};
use super::tile::{KeyStages, accumulate, copy_tile, products, resident, store, tile_memory};
use super::visible::{mask, visible_columns};
use crate::cube::mma::WARP;
use crate::cube::mma::ptx::{Quad, commit_copies, exp2, wait_for_copies};
use crate::cube::mma::swizzle::lane_row;

/// Computes the gradient of the queries, `dq = scale * ds k`. One cube processes `shape.rows()` queries of one head.
#[cube(launch_unchecked)]
pub(crate) fn mma_queries<F: Float, N: Size>(
    q: &[Vector<F, N>],
    k: &[Vector<F, N>],
    v: &[Vector<F, N>],
    dout: &[Vector<F, N>],
    lse: &[f32],
    delta: &[f32],
    bounds: &ComptimeOption<OwnedTensor<i32>>,
    dq: &mut [Vector<F, N>],
    strides: &AttentionStrides,
    dq_strides: &DeviceStrides,
    sizes: &AttentionSizes,
    #[comptime] shape: MmaShape,
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
        let out_rows = head_rows(&strides.out, batch, head, queries);

        let query_tile = tile_memory(shape);
        let gradient_tile = query_tile + comptime!(shape.bytes(rows) as u32);
        let stages = gradient_tile + comptime!(values.bytes(rows) as u32);
        let streamed = KeyStages::new(k, v, strides, &block, sizes, stages, shape);
        let stage_bytes = comptime!(shape.stage() as u32);

        let mut at = block.start;
        copy_tile(q, &q_rows, first, query_tile, rows, shape);
        copy_tile(dout, &out_rows, first, gradient_tile, rows, values);
        commit_copies();
        if at < block.end {
            streamed.copy(at, 0u32);
        }
        commit_copies();
        wait_for_copies(1usize);
        sync_cube();
        let q_resident = resident(query_tile, shape);
        let dout_resident = resident(gradient_tile, values);
        let own = first + (UNIT_POS as usize / WARP) * comptime!(shape.warp_rows());
        let visible = visible_columns(own, sizes, bounds, shape);

        let scale = sizes.scale * LOG2_E;
        let across = comptime!(columns / 8);
        let statistics = (batch * heads + head) * queries;
        let mut row_lse = Array::<f32>::new(comptime!(2 * shape.row_tiles));
        let mut row_delta = Array::<f32>::new(comptime!(2 * shape.row_tiles));
        #[unroll]
        for row in 0..2 * shape.row_tiles {
            let query = statistics + min(own + lane_row(row) as usize, queries - 1);
            row_lse[row] = lse[query] * LOG2_E;
            row_delta[row] = delta[query];
        }
        let mut sums = Array::<Vector<f32, Quad>>::new(comptime!(shape.sum_tiles()));
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
                let mut weights = products(&q_resident, streamed.key_tile(stage), shape);
                #[unroll]
                for index in 0..shape.score_tiles() {
                    let score = weights[index];
                    let mut weight = score;
                    #[unroll]
                    for element in 0..4usize {
                        let row = comptime!(index / across * 2 + element / 2);
                        let exponent = fma(score.extract(element), scale, -row_lse[row]);
                        weight.insert(element, exp2(exponent));
                    }
                    weights[index] = weight;
                }
                if !visible.all(at, columns) {
                    mask(&mut weights, 0.0f32, own, at, sizes, bounds, shape);
                }
                let dp = products(&dout_resident, streamed.value_tile(stage), values);
                #[unroll]
                for index in 0..shape.score_tiles() {
                    let gradient = dp[index];
                    let mut weight = weights[index];
                    #[unroll]
                    for element in 0..4usize {
                        let row = comptime!(index / across * 2 + element / 2);
                        let change = gradient.extract(element) - row_delta[row];
                        weight.insert(element, weight.extract(element) * change);
                    }
                    weights[index] = weight;
                }
                accumulate(&mut sums, &weights, streamed.key_tile(stage), shape);
            }
            stage = stage_bytes - stage;
            at = next;
        }
        let factors = filled(sizes.scale, comptime!(2 * shape.row_tiles));
        let dq_rows = head_rows(dq_strides, batch, head, queries);
        store(&sums, &factors, q_resident.start, dq, &dq_rows, own, shape);
    }
}
