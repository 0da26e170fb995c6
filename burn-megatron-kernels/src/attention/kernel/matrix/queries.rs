//! The gradient of the queries: queries are the resident tile, keys and values are streamed.

use cubecl::prelude::*;

use super::super::tile::{
    AttentionSizes, AttentionStrides, DeviceStrides, head_rows, visible_end, visible_start,
};
use super::plan::{MatrixTiles, TILE};
use super::tile::{accumulate, column, load, scores, store, store_weights};
use super::warp_tile::{WeightPair, lane_position, sync_warp, zeros};

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
    let width = comptime!(blocks.width);
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
        let q_rows = head_rows(&strides.q, batch, head, queries);
        let out_rows = head_rows(&strides.out, batch, head, queries);
        let k_rows = head_rows(&strides.k, batch, group, keys);
        let v_rows = head_rows(&strides.v, batch, group, keys);
        load(q, &q_rows, first, &mut resident, rows, blocks);
        load(dout, &out_rows, first, &mut gradient, rows, blocks);

        let mut sums = zeros(comptime!(width / TILE), products);
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
            load(k, &k_rows, key, &mut key_tile, columns, blocks);
            load(v, &v_rows, key, &mut value_tile, columns, blocks);
            sync_cube();
            let mut values = scores(&resident, &key_tile, &mut scratch, sizes.scale, blocks);
            #[unroll]
            for i in 0..own {
                let j = at + column(half, i) as i32;
                let p = (values[i] - row_lse).exp();
                values[i] = select(j >= visible_from && j < visible_to, p, 0.0f32);
            }
            sync_warp(products);
            let dp = scores(&gradient, &value_tile, &mut scratch, 1.0f32, blocks);
            #[unroll]
            for i in 0..own {
                values[i] *= dp[i] - row_delta;
            }
            store_weights::<F>(&values, &mut weights, blocks);
            accumulate(&mut sums, &weights, &key_tile, 0usize, width, blocks);
            at += columns as i32;
        }
        let dq_rows = head_rows(dq_strides, batch, head, queries);
        store(
            &sums,
            &mut scratch,
            sizes.scale,
            dq,
            &dq_rows,
            first,
            blocks,
        );
    }
}
