//! The kernels that compute the gradients. One kernel keeps queries in shared memory and streams keys. The other kernel
//! keeps keys in shared memory and streams queries. No two cubes write to the same place, and sums have a fixed order.

use cubecl::prelude::*;

use super::tile::{
    AttentionSizes, AttentionStrides, DeviceStrides, LANES, Tile, TileShape, VisibleRanges,
    accumulate, block, block_count, dots, filled, head_rows, store, visible_end, visible_start,
    zeros,
};
use crate::cube::{cube_sum, lane_sum};

/// Computes `delta[batch, heads, queries] = sum(out * dout)` over rows of `[batch, queries, heads, width]`, with
/// [`LANES`] units per row.
#[cube(launch_unchecked)]
pub(crate) fn attention_delta<F: Float, N: Size>(
    out: &[Vector<F, N>],
    dout: &[Vector<F, N>],
    delta: &mut [f32],
    rows: u32,
    queries: u32,
    heads: u32,
    #[comptime] width: usize,
    #[comptime] units: u32,
    #[define(F)] _dtype: ElemType,
) {
    let mut vectors_per_unit = Shared::<[f32]>::new_slice(units as usize);
    let lane = UNIT_POS as usize % LANES;
    let row = CUBE_POS * comptime!(units as usize / LANES) + UNIT_POS as usize / LANES;
    let mut sum = Vector::<f32, N>::new(0.0);
    if row < rows as usize {
        let mut column = lane;
        while column < width {
            let at = row * width + column;
            sum += Vector::<f32, N>::cast_from(out[at]) * Vector::<f32, N>::cast_from(dout[at]);
            column += LANES;
        }
    }
    vectors_per_unit[UNIT_POS as usize] = lane_sum(sum);
    sync_cube();
    if lane == 0 && row < rows as usize {
        let mut total = 0.0f32;
        for i in 0..LANES {
            total += vectors_per_unit[UNIT_POS as usize + i];
        }
        let (heads, queries) = (heads as usize, queries as usize);
        let query = row / heads % queries;
        let batch = row / heads / queries;
        delta[(batch * heads + row % heads) * queries + query] = total;
    }
}

/// Computes `dsink[head] = - sum over sequences and queries of exp(sink - lse) * delta`, with one
/// cube per head.
#[cube(launch_unchecked)]
pub(crate) fn attention_sink(
    sink: &[f32],
    lse: &[f32],
    delta: &[f32],
    dsink: &mut [f32],
    batches: u32,
    heads: u32,
    queries: u32,
    #[comptime] units: u32,
    #[comptime] planes: bool,
) {
    let head = CUBE_POS;
    if head < heads as usize {
        let logit = sink[head];
        let mut sum = 0.0f32;
        let mut at = UNIT_POS;
        while at < batches * queries {
            let (batch, query) = ((at / queries) as usize, (at % queries) as usize);
            let i = (batch * heads as usize + head) * queries as usize + query;
            sum += (logit - lse[i]).exp() * delta[i];
            at += units;
        }
        let total = cube_sum(sum, units, planes);
        if UNIT_POS == 0 {
            dsink[head] = -total;
        }
    }
}

/// Computes `dq = scale * ds k`. One cube processes `shape.rows` queries of one head.
#[cube(launch_unchecked)]
pub(crate) fn attention_queries<F: Float, N: Size>(
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
    #[comptime] shape: TileShape,
    #[define(F)] _dtype: ElemType,
) {
    let own = comptime!(shape.own);
    let columns = comptime!(shape.columns_per_unit());
    let weight_pitch = comptime!(shape.weight_pitch());
    let width = comptime!(shape.width);
    let value_width = comptime!(shape.value_width);
    let heads = sizes.heads as usize;
    if CUBE_POS < block_count(sizes, heads, shape.rows) {
        let block = block(sizes, heads, bounds, true, shape.rows);
        let (batch, head, first) = (block.batch, block.head, block.first);
        let group = head / sizes.heads_per_group as usize;
        let queries = sizes.mask_range.rows as usize;
        let keys = sizes.mask_range.columns as usize;
        let lane = UNIT_POS as usize % LANES;
        let row = UNIT_POS as usize / LANES * own;

        let mut resident = Tile::<N>::new(shape.rows, shape);
        let mut gradient = Tile::<N>::new(shape.rows, shape);
        let mut streamed = Tile::<N>::new(shape.columns, shape);
        let mut weights = Shared::<[f32]>::new_slice(comptime!(shape.rows * weight_pitch));
        let q_rows = head_rows(&strides.q, batch, head, queries);
        let out_rows = head_rows(&strides.out, batch, head, queries);
        let k_rows = head_rows(&strides.k, batch, group, keys);
        let v_rows = head_rows(&strides.v, batch, group, keys);
        resident.load(q, &q_rows, first, sizes.scale, width);
        gradient.load(dout, &out_rows, first, 1.0f32, value_width);

        let mut sums = zeros::<N>(width, shape);
        let mut row_lse = Shared::<[f32]>::new_slice(shape.rows);
        let mut row_delta = Shared::<[f32]>::new_slice(shape.rows);
        let visible = VisibleRanges::new(first, sizes, bounds, shape);
        let statistics = (batch * heads + head) * queries;
        if (UNIT_POS as usize) < shape.rows {
            let at = statistics + min(first + UNIT_POS as usize, queries - 1);
            row_lse[UNIT_POS as usize] = lse[at];
            row_delta[UNIT_POS as usize] = delta[at];
        }
        let mut at = block.start;
        while at < block.end {
            sync_cube();
            let key = at as usize;
            streamed.load(v, &v_rows, key, 1.0f32, value_width);
            sync_cube();
            // The values are kept in shared memory while the scores are computed. Only this unit reads them.
            let dp = dots::<N>(&gradient, &streamed, value_width, shape);
            #[unroll]
            for r in 0..own {
                #[unroll]
                for c in 0..columns {
                    weights[(row + r) * weight_pitch + lane + c * LANES] =
                        dp[comptime!(r * columns + c)] - row_delta[row + r];
                }
            }
            sync_cube();
            streamed.load(k, &k_rows, key, 1.0f32, width);
            sync_cube();
            let scores = dots::<N>(&resident, &streamed, width, shape);
            #[unroll]
            for r in 0..own {
                #[unroll]
                for c in 0..columns {
                    let i = comptime!(r * columns + c);
                    let j = at + (lane + c * LANES) as i32;
                    let cell = (row + r) * weight_pitch + lane + c * LANES;
                    let ds = (scores[i] - row_lse[row + r]).exp() * weights[cell];
                    weights[cell] = select(visible.contains(row + r, j), ds, 0.0f32);
                }
            }
            sync_cube();
            accumulate::<N>(&weights, &streamed, &mut sums, width, shape);
            at += shape.columns as i32;
        }
        let factors = filled(sizes.scale, own);
        let dq_rows = head_rows(dq_strides, batch, head, queries);
        store(&sums, &factors, dq, &dq_rows, first, false, width, shape);
    }
}

/// Computes the gradients of keys and values, `dk = ds^T (scale * q)` and `dv = p^T dout`.
///
/// One cube processes `shape.rows` keys of one group and all heads of the group, one after the other.
/// `sizes.mask_range` is the range of queries to which a key is visible. `add` selects, for `dk` and `dv`, whether the
/// kernel adds to the existing values.
#[cube(launch_unchecked)]
pub(crate) fn attention_keys<F: Float, G: Float, N: Size>(
    q: &[Vector<F, N>],
    k: &[Vector<F, N>],
    v: &[Vector<F, N>],
    dout: &[Vector<F, N>],
    lse: &[f32],
    delta: &[f32],
    bounds: &ComptimeOption<OwnedTensor<i32>>,
    gradients: &mut [Vector<G, N>],
    strides: &AttentionStrides,
    dk_strides: &DeviceStrides,
    dv_strides: &DeviceStrides,
    sizes: &AttentionSizes,
    #[comptime] shape: TileShape,
    #[comptime] add: [bool; 2],
    #[define(F, G)] _dtypes: [ElemType; 2],
) {
    let own = comptime!(shape.own);
    let columns = comptime!(shape.columns_per_unit());
    let weight_pitch = comptime!(shape.weight_pitch());
    let width = comptime!(shape.width);
    let value_width = comptime!(shape.value_width);
    let keys = sizes.mask_range.rows as usize;
    let queries = sizes.mask_range.columns as usize;
    let tiles = keys.div_ceil(shape.rows);
    let groups = (sizes.heads / sizes.heads_per_group) as usize;
    let sequences = sizes.batches as usize * groups;
    let cube = CUBE_POS;
    // `block` would compute the visible columns before they are needed, and this kernel has no spare registers.
    if cube < tiles * sequences {
        let first = cube / sequences * shape.rows;
        let group = cube % sequences % groups;
        let batch = cube % sequences / groups;
        let lane = UNIT_POS as usize % LANES;
        let row = UNIT_POS as usize / LANES * own;

        let mut resident = Tile::<N>::new(shape.rows, shape);
        let mut values = Tile::<N>::new(shape.rows, shape);
        let mut streamed = Tile::<N>::new(shape.columns, shape);
        let mut weights = Shared::<[f32]>::new_slice(comptime!(shape.rows * weight_pitch));
        let k_rows = head_rows(&strides.k, batch, group, keys);
        let v_rows = head_rows(&strides.v, batch, group, keys);
        resident.load(k, &k_rows, first, 1.0f32, width);
        values.load(v, &v_rows, first, 1.0f32, value_width);

        let mut dk = zeros::<N>(width, shape);
        let mut dv = zeros::<N>(value_width, shape);
        let visible = VisibleRanges::new(first, sizes, bounds, shape);
        let last = min(first + shape.rows, keys) - 1;
        let begin = visible_start(first as i32, &sizes.mask_range, bounds);
        let end = visible_end(last as i32, &sizes.mask_range, bounds);
        for member in 0..sizes.heads_per_group as usize {
            let head = group * sizes.heads_per_group as usize + member;
            let q_rows = head_rows(&strides.q, batch, head, queries);
            let out_rows = head_rows(&strides.out, batch, head, queries);
            let statistics = (batch * sizes.heads as usize + head) * queries;
            let mut at = begin;
            while at < end {
                let query = at as usize;
                sync_cube();
                streamed.load(q, &q_rows, query, sizes.scale, width);
                sync_cube();
                let scores = dots::<N>(&resident, &streamed, width, shape);
                #[unroll]
                for c in 0..columns {
                    let i = at + (lane + c * LANES) as i32;
                    let of_query = lse[statistics + min(i, sizes.mask_range.columns - 1) as usize];
                    #[unroll]
                    for r in 0..own {
                        let p = (scores[comptime!(r * columns + c)] - of_query).exp();
                        weights[(row + r) * weight_pitch + lane + c * LANES] =
                            select(visible.contains(row + r, i), p, 0.0f32);
                    }
                }
                sync_cube();
                streamed.load(dout, &out_rows, query, 1.0f32, value_width);
                sync_cube();
                accumulate::<N>(&weights, &streamed, &mut dv, value_width, shape);
                let dp = dots::<N>(&values, &streamed, value_width, shape);
                sync_cube();
                #[unroll]
                for c in 0..columns {
                    let i = min(at + (lane + c * LANES) as i32, sizes.mask_range.columns - 1);
                    let of_query = delta[statistics + i as usize];
                    #[unroll]
                    for r in 0..own {
                        weights[(row + r) * weight_pitch + lane + c * LANES] *=
                            dp[comptime!(r * columns + c)] - of_query;
                    }
                }
                streamed.load(q, &q_rows, query, sizes.scale, width);
                sync_cube();
                accumulate::<N>(&weights, &streamed, &mut dk, width, shape);
                at += shape.columns as i32;
            }
        }
        let factors = filled(1.0f32, own);
        let rows = head_rows(dk_strides, batch, group, keys);
        store(&dk, &factors, gradients, &rows, first, add[0], width, shape);
        let rows = head_rows(dv_strides, batch, group, keys);
        store(
            &dv,
            &factors,
            gradients,
            &rows,
            first,
            add[1],
            value_width,
            shape,
        );
    }
}
