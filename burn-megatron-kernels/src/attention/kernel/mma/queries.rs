//! The gradient of the queries: queries and the gradient of the output are resident, keys and values
//! are streamed.

use cubecl::prelude::*;

use super::super::tile::{
    AttentionSizes, AttentionStrides, DeviceStrides, head_rows, visible_end, visible_start,
};
use super::plan::{LOG2_E, MmaShape};
use super::tile::{accumulate, copy_tile, products, resident, store};
use super::visible::{mask, visible_columns};
use crate::cube::mma::WARP;
use crate::cube::mma::ptx::{Quad, commit_copies, exp2, shared_address, wait_for_copies};
use crate::cube::mma::swizzle::{column_lane, lane_row, row_lane};

/// `dq = scale * ds k`: one cube takes `shape.rows()` queries of one head.
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
        let q_rows = head_rows(&strides.q, batch, head, queries);
        let out_rows = head_rows(&strides.out, batch, head, queries);
        let k_rows = head_rows(&strides.k, batch, group, keys);
        let v_rows = head_rows(&strides.v, batch, group, keys);

        let memory = Shared::<[Vector<u32, Quad>]>::new_aligned_slice(
            comptime!(shape.memory() / 16),
            128usize,
        );
        let query_tile = shared_address(&memory[0usize..1usize]);
        let gradient_tile = query_tile + comptime!(shape.bytes(rows) as u32);
        let key_tile = gradient_tile + comptime!(values.bytes(rows) as u32);
        let value_tile = key_tile + comptime!(shape.bytes(columns) as u32);
        let stage_bytes = comptime!(shape.stage() as u32);

        let last = min(first + rows, queries) - 1;
        let mut at = visible_start(first as i32, &sizes.mask_range, bounds);
        let end = visible_end(last as i32, &sizes.mask_range, bounds);
        copy_tile(q, &q_rows, first, query_tile, rows, shape);
        copy_tile(dout, &out_rows, first, gradient_tile, rows, values);
        commit_copies();
        if at < end {
            copy_tile(k, &k_rows, at as usize, key_tile, columns, shape);
            copy_tile(v, &v_rows, at as usize, value_tile, columns, values);
        }
        commit_copies();
        wait_for_copies(1usize);
        sync_cube();
        let q_resident = resident(query_tile, shape);
        let dout_resident = resident(gradient_tile, values);
        let own = first + (UNIT_POS as usize / WARP) * comptime!(shape.warp_rows());
        let visible = visible_columns(
            own,
            comptime!(shape.warp_rows()).runtime(),
            &sizes.mask_range,
            bounds,
        );

        let scale = sizes.scale * LOG2_E;
        let across = comptime!(columns / 8);
        let statistics = (batch * sizes.heads as usize + head) * queries;
        let mut row_lse = Array::<f32>::new(comptime!(2 * shape.row_tiles));
        let mut row_delta = Array::<f32>::new(comptime!(2 * shape.row_tiles));
        let mut factors = Array::<f32>::new(comptime!(2 * shape.row_tiles));
        #[unroll]
        for row in 0..2 * shape.row_tiles {
            let query = statistics + min(own + lane_row(row) as usize, queries - 1);
            row_lse[row] = lse[query] * LOG2_E;
            row_delta[row] = delta[query];
            factors[row] = sizes.scale;
        }
        let mut sums = Array::<Vector<f32, Quad>>::new(comptime!(shape.sum_tiles()));
        let mut stage = 0u32;
        while at < end {
            wait_for_copies(0usize);
            sync_cube();
            let next = at + columns as i32;
            if next < end {
                let other = stage_bytes - stage;
                copy_tile(k, &k_rows, next as usize, key_tile + other, columns, shape);
                copy_tile(
                    v,
                    &v_rows,
                    next as usize,
                    value_tile + other,
                    columns,
                    values,
                );
            }
            commit_copies();
            if visible.some(at, columns) {
                let mut weights = products(
                    &q_resident,
                    column_lane(key_tile + stage, shape.swizzle()),
                    shape,
                );
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
                    mask(
                        &mut weights,
                        0.0f32,
                        own,
                        at,
                        &sizes.mask_range,
                        bounds,
                        shape,
                    );
                }
                let dp = products(
                    &dout_resident,
                    column_lane(value_tile + stage, values.swizzle()),
                    values,
                );
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
                accumulate(
                    &mut sums,
                    &weights,
                    row_lane(key_tile + stage, shape.swizzle()),
                    shape,
                );
            }
            stage = stage_bytes - stage;
            at = next;
        }
        let dq_rows = head_rows(dq_strides, batch, head, queries);
        store(&sums, &factors, q_resident.start, dq, &dq_rows, own, shape);
    }
}
