//! The gradient of the queries: queries are the resident tile, keys and values are streamed.

use cubecl::prelude::*;

use super::super::tile::{
    AttentionSizes, AttentionStrides, DeviceStrides, start, visible_end, visible_start,
};
use super::plan::{MatrixTiles, TILE};
use super::tile::{column, load, load_scores, store, store_weights};
use super::warp_tile::{
    WeightPair, lane_position, multiply, store_to_shared, sync_warp, warp_row, zeros,
};

/// `dq = scale * ds k`: one cube takes `blocks.rows()` queries of one head, each of its planes 16
/// of them. No row of the sums is ever scaled, so these stay where the matrix units keep them.
#[cube(launch_unchecked)]
pub(crate) fn matrix_queries<F: Float, N: Size>(
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
    #[comptime] blocks: MatrixTiles,
    #[define(F)] _dtype: ElemType,
) {
    let rows = comptime!(blocks.rows());
    let columns = comptime!(blocks.columns);
    let own = comptime!(columns / 2);
    let products = comptime!(blocks.products);
    let pitch = comptime!(blocks.pitch());
    let queries = sizes.mask_range.rows as usize;
    let keys = sizes.mask_range.columns as usize;
    let tiles = queries.div_ceil(rows);
    let sequences = (sizes.batches * sizes.heads) as usize;
    let cube = CUBE_POS;
    if cube < tiles * sequences {
        let first = (tiles - 1 - cube / sequences) * rows;
        let head = cube % sequences % sizes.heads as usize;
        let batch = cube % sequences / sizes.heads as usize;
        let group = head / sizes.heads_per_group as usize;
        let (row, half) = lane_position();

        let vectors = comptime!(blocks.vectors());
        let strip_at = warp_row() * vectors;
        let mut resident =
            Shared::<[Vector<F, N>]>::new_aligned_slice(comptime!(rows * vectors), 128usize);
        let mut gradient =
            Shared::<[Vector<F, N>]>::new_aligned_slice(comptime!(rows * vectors), 128usize);
        let mut key_tile =
            Shared::<[Vector<F, N>]>::new_aligned_slice(comptime!(columns * vectors), 128usize);
        let mut value_tile =
            Shared::<[Vector<F, N>]>::new_aligned_slice(comptime!(columns * vectors), 128usize);
        let mut weights = Shared::<[Vector<F, WeightPair>]>::new_aligned_slice(
            comptime!(rows * blocks.weight_pitch() / 2),
            128usize,
        );
        let mut scratch =
            Shared::<[f32]>::new_aligned_slice(comptime!(rows * blocks.scratch_pitch()), 128usize);
        let (q_start, out_start) = (
            start(&strides.q, batch, head),
            start(&strides.out, batch, head),
        );
        let (k_start, v_start) = (
            start(&strides.k, batch, group),
            start(&strides.v, batch, group),
        );
        let (q_row, out_row) = (strides.q.row as usize, strides.out.row as usize);
        let (k_row, v_row) = (strides.k.row as usize, strides.v.row as usize);
        load(
            q,
            q_start,
            q_row,
            first,
            queries,
            &mut resident,
            rows,
            blocks,
        );
        load(
            dout,
            out_start,
            out_row,
            first,
            queries,
            &mut gradient,
            rows,
            blocks,
        );

        let mut sums = zeros(comptime!(blocks.width / TILE), products);
        let query = min(first + row, queries - 1);
        let visible_from = visible_start(query as i32, &sizes.mask_range, bounds);
        let visible_to = visible_end(query as i32, &sizes.mask_range, bounds);
        let statistics = (batch * sizes.heads as usize + head) * queries + query;
        let row_lse = lse[statistics];
        let row_delta = delta[statistics];
        let last = min(first + rows, queries) - 1;
        let mut at = visible_start(first as i32, &sizes.mask_range, bounds);
        let end = visible_end(last as i32, &sizes.mask_range, bounds);
        while at < end {
            sync_cube();
            let key = at as usize;
            load(k, k_start, k_row, key, keys, &mut key_tile, columns, blocks);
            load(
                v,
                v_start,
                v_row,
                key,
                keys,
                &mut value_tile,
                columns,
                blocks,
            );
            sync_cube();
            let mut warp_tile = zeros(comptime!(columns / TILE), products);
            multiply::<F, N, N>(
                &mut warp_tile,
                &resident,
                strip_at,
                pitch,
                &key_tile,
                0usize,
                pitch,
                true,
                comptime!(blocks.width),
                comptime!(columns / TILE),
                products,
            );
            store_to_shared(&warp_tile, &mut scratch, 0usize, columns, blocks);
            let mut values = load_scores(&scratch, sizes.scale, blocks);
            #[unroll]
            for i in 0..own {
                let j = at + column(half, i) as i32;
                let p = (values[i] - row_lse).exp();
                values[i] = select(j >= visible_from && j < visible_to, p, 0.0f32);
            }
            sync_warp(products);
            let mut warp_tile = zeros(comptime!(columns / TILE), products);
            multiply::<F, N, N>(
                &mut warp_tile,
                &gradient,
                strip_at,
                pitch,
                &value_tile,
                0usize,
                pitch,
                true,
                comptime!(blocks.width),
                comptime!(columns / TILE),
                products,
            );
            store_to_shared(&warp_tile, &mut scratch, 0usize, columns, blocks);
            let dp = load_scores(&scratch, 1.0f32, blocks);
            #[unroll]
            for i in 0..own {
                values[i] *= dp[i] - row_delta;
            }
            store_weights::<F>(&values, &mut weights, blocks);
            multiply::<F, WeightPair, N>(
                &mut sums,
                &weights,
                warp_row() * comptime!(blocks.weight_pitch() / 2),
                comptime!(blocks.weight_pitch()),
                &key_tile,
                0usize,
                pitch,
                false,
                columns,
                comptime!(blocks.width / TILE),
                products,
            );
            at += columns as i32;
        }
        let (to, stride) = (start(dq_strides, batch, head), dq_strides.row as usize);
        store(
            &sums,
            &mut scratch,
            sizes.scale,
            dq,
            to,
            stride,
            first,
            queries,
            blocks,
        );
    }
}
