//! The kernel for the gradients of keys and values. It keeps a tile of keys and values in shared memory and streams
//! tiles of queries and of the gradient of the output.

use cubecl::prelude::*;

use super::super::tile::{
    AttentionSizes, AttentionStrides, DeviceStrides, HeadRows, block, block_count, filled,
    head_rows,
};
use super::plan::{LOG2_E, MmaShape};
use super::tile::{accumulate, copy_tile, products, resident, store, store_sums, tile_memory};
use super::visible::{mask, visible_columns};
use crate::cube::mma::WARP;
use crate::cube::mma::ptx::{Quad, commit_copies, copy_4_bytes, exp2, load_pair, wait_for_copies};
use crate::cube::mma::swizzle::lane_column;

/// Computes the gradients of keys and values, `dk = scale * ds^T q` and `dv = p^T dout`.
///
/// One cube processes `shape.rows()` keys of one group and all heads of the group, one after the other.
/// `sizes.mask_range` is the range of queries to which a key is visible. `flat` is true if `gradients` are pairs of
/// f32. `add` selects, for `dk` and `dv`, whether the kernel adds to the existing values.
///
/// The scores are computed transposed, with one row per key. The weights and score gradients can therefore stay in
/// registers as left operands of the following matrix multiplications.
#[cube(launch_unchecked)]
pub(crate) fn mma_keys<F: Float, N: Size, G: Float, M: Size>(
    q: &[Vector<F, N>],
    k: &[Vector<F, N>],
    v: &[Vector<F, N>],
    dout: &[Vector<F, N>],
    lse: &[f32],
    delta: &[f32],
    bounds: &ComptimeOption<OwnedTensor<i32>>,
    gradients: &mut [Vector<G, M>],
    strides: &AttentionStrides,
    dk_strides: &DeviceStrides,
    dv_strides: &DeviceStrides,
    sizes: &AttentionSizes,
    #[comptime] shape: MmaShape,
    #[comptime] flat: bool,
    #[comptime] add: [bool; 2],
    #[define(F, G)] _dtypes: [ElemType; 2],
) {
    let values = comptime!(shape.of_values());
    let rows = comptime!(shape.rows());
    let columns = comptime!(shape.columns);
    let heads = sizes.heads as usize;
    let groups = heads / sizes.heads_per_group as usize;
    if CUBE_POS < block_count(sizes, groups, rows) {
        let block = block(sizes, groups, bounds, false, rows);
        let (batch, group, first) = (block.batch, block.head, block.first);
        let keys = sizes.mask_range.rows as usize;
        let queries = sizes.mask_range.columns as usize;
        let k_rows = head_rows(&strides.k, batch, group, keys);
        let v_rows = head_rows(&strides.v, batch, group, keys);

        let key_tile = tile_memory(shape);
        let value_tile = key_tile + comptime!(shape.bytes(rows) as u32);
        let stages = value_tile + comptime!(values.bytes(rows) as u32);
        let stage_bytes = comptime!(shape.stage() as u32);

        let (begin, end) = (block.start, block.end);
        let mut head = group * sizes.heads_per_group as usize;
        let mut remaining = select(begin < end, sizes.heads_per_group, 0u32);
        let mut at = begin;
        copy_tile(k, &k_rows, first, key_tile, rows, shape);
        copy_tile(v, &v_rows, first, value_tile, rows, values);
        commit_copies();
        if remaining > 0 {
            copy_queries(
                q, dout, lse, delta, strides, batch, head, heads, queries, at, stages, shape,
            );
        }
        commit_copies();
        wait_for_copies(1usize);
        sync_cube();
        let k_resident = resident(key_tile, shape);
        let v_resident = resident(value_tile, values);
        let own = first + (UNIT_POS as usize / WARP) * comptime!(shape.warp_rows());
        let visible = visible_columns(own, sizes, bounds, shape);

        let scale = sizes.scale * LOG2_E;
        let mut dk = Array::<Vector<f32, Quad>>::new(comptime!(shape.sum_tiles()));
        let mut dv = Array::<Vector<f32, Quad>>::new(comptime!(values.sum_tiles()));
        let mut stage = 0u32;
        while remaining > 0 {
            wait_for_copies(0usize);
            sync_cube();
            let mut next = at + columns as i32;
            if next >= end {
                next = begin;
                head += 1usize;
                remaining -= 1u32;
            }
            if remaining > 0 {
                let other = stages + stage_bytes - stage;
                copy_queries(
                    q, dout, lse, delta, strides, batch, head, heads, queries, next, other, shape,
                );
            }
            commit_copies();
            if visible.some(at, columns) {
                let query_tile = stages + stage;
                let gradient_tile = query_tile + comptime!(shape.bytes(columns) as u32);
                let of_queries =
                    gradient_tile + comptime!(values.bytes(columns) as u32) + lane_column() * 4;
                let mut weights = products(&k_resident, query_tile, shape);
                weigh(&mut weights, of_queries, scale, shape);
                if !visible.all(at, columns) {
                    mask(&mut weights, 0.0f32, own, at, sizes, bounds, shape);
                }
                if comptime!(shape.sums_values) {
                    accumulate(&mut dv, &weights, gradient_tile, values);
                }
                if comptime!(shape.sums_keys) {
                    let dp = products(&v_resident, gradient_tile, values);
                    differentiate(&mut weights, &dp, of_queries, shape);
                    accumulate(&mut dk, &weights, query_tile, shape);
                }
            }
            stage = stage_bytes - stage;
            at = next;
        }
        if comptime!(shape.sums_keys) {
            let rows = head_rows(dk_strides, batch, group, keys);
            let (start, factor) = (k_resident.start, sizes.scale);
            write(
                &dk, factor, start, gradients, &rows, own, flat, add[0], shape,
            );
        }
        if comptime!(shape.sums_values) {
            let rows = head_rows(dv_strides, batch, group, keys);
            let start = v_resident.start;
            write(
                &dv, 1.0f32, start, gradients, &rows, own, flat, add[1], values,
            );
        }
    }
}

/// Stores sums times `factor`, in the type of the inputs or in f32.
#[cube]
fn write<G: Float, M: Size>(
    sums: &Array<Vector<f32, Quad>>,
    factor: f32,
    start: u32,
    to: &mut [Vector<G, M>],
    head: &HeadRows,
    first: usize,
    #[comptime] flat: bool,
    #[comptime] add: bool,
    #[comptime] shape: MmaShape,
) {
    let factors = filled(factor, comptime!(2 * shape.row_tiles));
    if comptime!(flat) {
        store_sums(sums, &factors, to, head, first, add, shape);
    } else {
        store(sums, &factors, start, to, head, first, shape);
    }
}

/// Starts to copy queries of a head, the gradient of their output, and both statistics to one stage, starting at query
/// `at`. Rows after the last query are zero, so that their weights stay finite and do not change the sums.
#[cube]
fn copy_queries<F: Float, N: Size>(
    q: &[Vector<F, N>],
    dout: &[Vector<F, N>],
    lse: &[f32],
    delta: &[f32],
    strides: &AttentionStrides,
    batch: usize,
    head: usize,
    heads: usize,
    queries: usize,
    at: i32,
    to: u32,
    #[comptime] shape: MmaShape,
) {
    let values = comptime!(shape.of_values());
    let columns = comptime!(shape.columns);
    let gradients = to + comptime!(shape.bytes(columns) as u32);
    let statistics = gradients + comptime!(values.bytes(columns) as u32);
    let q_rows = head_rows(&strides.q, batch, head, queries);
    let out_rows = head_rows(&strides.out, batch, head, queries);
    copy_tile(q, &q_rows, at as usize, to, columns, shape);
    copy_tile(dout, &out_rows, at as usize, gradients, columns, values);
    let unit = UNIT_POS as usize;
    let query = at as usize + unit % columns;
    let from = (batch * heads + head) * queries + query;
    let target = statistics + UNIT_POS * 4;
    let bytes = select(query < queries, 4u32, 0u32);
    if unit < columns {
        copy_4_bytes(&lse[from..from + 1], target, bytes);
    } else if unit < comptime!(2 * columns) {
        copy_4_bytes(&delta[from..from + 1], target, bytes);
    }
}

/// Converts scores to weights, using the log-sum-exps of this lane's columns. The columns start at `of_queries`.
#[cube]
fn weigh(
    scores: &mut Array<Vector<f32, Quad>>,
    of_queries: u32,
    scale: f32,
    #[comptime] shape: MmaShape,
) {
    let across = comptime!(shape.columns / 8);
    #[unroll]
    for tile in 0..across {
        let lse = load_pair(of_queries + comptime!((32 * tile) as u32));
        let offsets = lse * Vector::new(-LOG2_E);
        #[unroll]
        for row in 0..shape.row_tiles {
            let index = comptime!(row * across + tile);
            let mut score = scores[index];
            #[unroll]
            for element in 0..4usize {
                let offset = offsets.extract(comptime!(element % 2));
                score.insert(element, exp2(fma(score.extract(element), scale, offset)));
            }
            scores[index] = score;
        }
    }
}

/// Converts weights to score gradients: `p * (dp - delta)`.
#[cube]
fn differentiate(
    weights: &mut Array<Vector<f32, Quad>>,
    dp: &Array<Vector<f32, Quad>>,
    of_queries: u32,
    #[comptime] shape: MmaShape,
) {
    let across = comptime!(shape.columns / 8);
    #[unroll]
    for tile in 0..across {
        let delta = load_pair(of_queries + comptime!((4 * shape.columns + 32 * tile) as u32));
        #[unroll]
        for row in 0..shape.row_tiles {
            let index = comptime!(row * across + tile);
            let gradient = dp[index];
            let mut weight = weights[index];
            #[unroll]
            for element in 0..4usize {
                let change = gradient.extract(element) - delta.extract(comptime!(element % 2));
                weight.insert(element, weight.extract(element) * change);
            }
            weights[index] = weight;
        }
    }
}
