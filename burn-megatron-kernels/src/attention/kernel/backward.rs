//! The gradients: one kernel keeps queries resident and streams keys, the other does the reverse.
//! No two cubes write to one place, and sums are in a fixed order.

use cubecl::prelude::*;

use super::tile::{
    AttentionSizes, AttentionStrides, DeviceStrides, LANES, TileShape, accumulate, dots, head_rows,
    load, store, visible_end, visible_ranges, visible_start, zeros,
};
use crate::cube::{cube_sum, lane_sum};

/// `delta[batch, heads, queries] = sum(out * dout)` of rows `[batch, queries, heads, width]`, with
/// [`LANES`] units for a row.
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

/// `dsink[head] = - sum over sequences and queries of exp(sink - lse) * delta`; one cube per head.
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

/// `dq = scale * ds k`: one cube takes `shape.rows` queries of one head.
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
    let queries = sizes.mask_range.rows as usize;
    let keys = sizes.mask_range.columns as usize;
    let tiles = queries.div_ceil(shape.rows);
    let sequences = (sizes.batches * sizes.heads) as usize;
    let cube = CUBE_POS;
    if cube < tiles * sequences {
        let tile = tiles - 1 - cube / sequences;
        let head = cube % sequences % sizes.heads as usize;
        let batch = cube % sequences / sizes.heads as usize;
        let group = head / sizes.heads_per_group as usize;
        let first = tile * shape.rows;
        let lane = UNIT_POS as usize % LANES;
        let row = UNIT_POS as usize / LANES * own;

        let mut resident =
            Shared::<[Vector<f32, N>]>::new_slice(comptime!(shape.rows * shape.pitch()));
        let mut gradient =
            Shared::<[Vector<f32, N>]>::new_slice(comptime!(shape.rows * shape.pitch()));
        let mut streamed =
            Shared::<[Vector<f32, N>]>::new_slice(comptime!(shape.columns * shape.pitch()));
        let mut weights = Shared::<[f32]>::new_slice(comptime!(shape.rows * weight_pitch));
        let q_rows = head_rows(&strides.q, batch, head, queries);
        let out_rows = head_rows(&strides.out, batch, head, queries);
        let k_rows = head_rows(&strides.k, batch, group, keys);
        let v_rows = head_rows(&strides.v, batch, group, keys);
        load(
            q,
            &q_rows,
            first,
            sizes.scale,
            &mut resident,
            shape.rows,
            shape.width,
            shape,
        );
        load(
            dout,
            &out_rows,
            first,
            1.0f32,
            &mut gradient,
            shape.rows,
            shape.value_width,
            shape,
        );

        let mut sums = zeros::<N>(shape.width, shape);
        let mut row_lse = Shared::<[f32]>::new_slice(shape.rows);
        let mut row_delta = Shared::<[f32]>::new_slice(shape.rows);
        let mut lows = Shared::<[i32]>::new_slice(shape.rows);
        let mut highs = Shared::<[i32]>::new_slice(shape.rows);
        visible_ranges(
            first,
            &sizes.mask_range,
            bounds,
            &mut lows,
            &mut highs,
            shape,
        );
        let statistics = (batch * sizes.heads as usize + head) * queries;
        if (UNIT_POS as usize) < shape.rows {
            let at = statistics + min(first + UNIT_POS as usize, queries - 1);
            row_lse[UNIT_POS as usize] = lse[at];
            row_delta[UNIT_POS as usize] = delta[at];
        }
        let last = min(first + shape.rows, queries) - 1;
        let mut at = visible_start(first as i32, &sizes.mask_range, bounds);
        let end = visible_end(last as i32, &sizes.mask_range, bounds);
        while at < end {
            sync_cube();
            let key = at as usize;
            load(
                v,
                &v_rows,
                key,
                1.0f32,
                &mut streamed,
                shape.columns,
                shape.value_width,
                shape,
            );
            sync_cube();
            // Kept in shared memory while the scores are computed; only this unit reads it.
            let dp = dots::<N>(&gradient, &streamed, shape.value_width, shape);
            #[unroll]
            for r in 0..own {
                #[unroll]
                for c in 0..columns {
                    weights[(row + r) * weight_pitch + lane + c * LANES] =
                        dp[comptime!(r * columns + c)] - row_delta[row + r];
                }
            }
            sync_cube();
            load(
                k,
                &k_rows,
                key,
                1.0f32,
                &mut streamed,
                shape.columns,
                shape.width,
                shape,
            );
            sync_cube();
            let scores = dots::<N>(&resident, &streamed, shape.width, shape);
            #[unroll]
            for r in 0..own {
                #[unroll]
                for c in 0..columns {
                    let i = comptime!(r * columns + c);
                    let j = at + (lane + c * LANES) as i32;
                    let cell = (row + r) * weight_pitch + lane + c * LANES;
                    let ds = (scores[i] - row_lse[row + r]).exp() * weights[cell];
                    weights[cell] = select(j >= lows[row + r] && j < highs[row + r], ds, 0.0f32);
                }
            }
            sync_cube();
            accumulate::<N>(&weights, &streamed, &mut sums, shape.width, shape);
            at += shape.columns as i32;
        }
        let mut factors = Array::<f32>::new(own);
        #[unroll]
        for r in 0..own {
            factors[r] = sizes.scale;
        }
        let dq_rows = head_rows(dq_strides, batch, head, queries);
        store(
            &sums,
            &factors,
            dq,
            &dq_rows,
            first,
            false,
            shape.width,
            shape,
        );
    }
}

/// `dv = p^T dout` and `dk = ds^T (scale * q)`: one cube takes `shape.rows` keys of one group, and
/// all the heads of it one after the other. `sizes.mask_range`: which queries see a key. `add`: whether
/// to add `dk`, and `dv`, to what is there.
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
    let keys = sizes.mask_range.rows as usize;
    let queries = sizes.mask_range.columns as usize;
    let tiles = keys.div_ceil(shape.rows);
    let groups = (sizes.heads / sizes.heads_per_group) as usize;
    let sequences = sizes.batches as usize * groups;
    let cube = CUBE_POS;
    if cube < tiles * sequences {
        let first = cube / sequences * shape.rows;
        let group = cube % sequences % groups;
        let batch = cube % sequences / groups;
        let lane = UNIT_POS as usize % LANES;
        let row = UNIT_POS as usize / LANES * own;

        let mut resident =
            Shared::<[Vector<f32, N>]>::new_slice(comptime!(shape.rows * shape.pitch()));
        let mut values =
            Shared::<[Vector<f32, N>]>::new_slice(comptime!(shape.rows * shape.pitch()));
        let mut streamed =
            Shared::<[Vector<f32, N>]>::new_slice(comptime!(shape.columns * shape.pitch()));
        let mut weights = Shared::<[f32]>::new_slice(comptime!(shape.rows * weight_pitch));
        let k_rows = head_rows(&strides.k, batch, group, keys);
        let v_rows = head_rows(&strides.v, batch, group, keys);
        load(
            k,
            &k_rows,
            first,
            1.0f32,
            &mut resident,
            shape.rows,
            shape.width,
            shape,
        );
        load(
            v,
            &v_rows,
            first,
            1.0f32,
            &mut values,
            shape.rows,
            shape.value_width,
            shape,
        );

        let mut dk = zeros::<N>(shape.width, shape);
        let mut dv = zeros::<N>(shape.value_width, shape);
        let mut lows = Shared::<[i32]>::new_slice(shape.rows);
        let mut highs = Shared::<[i32]>::new_slice(shape.rows);
        visible_ranges(
            first,
            &sizes.mask_range,
            bounds,
            &mut lows,
            &mut highs,
            shape,
        );
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
                load(
                    q,
                    &q_rows,
                    query,
                    sizes.scale,
                    &mut streamed,
                    shape.columns,
                    shape.width,
                    shape,
                );
                sync_cube();
                let scores = dots::<N>(&resident, &streamed, shape.width, shape);
                #[unroll]
                for c in 0..columns {
                    let i = at + (lane + c * LANES) as i32;
                    let of_query = lse[statistics + min(i, sizes.mask_range.columns - 1) as usize];
                    #[unroll]
                    for r in 0..own {
                        let p = (scores[comptime!(r * columns + c)] - of_query).exp();
                        weights[(row + r) * weight_pitch + lane + c * LANES] =
                            select(i >= lows[row + r] && i < highs[row + r], p, 0.0f32);
                    }
                }
                sync_cube();
                load(
                    dout,
                    &out_rows,
                    query,
                    1.0f32,
                    &mut streamed,
                    shape.columns,
                    shape.value_width,
                    shape,
                );
                sync_cube();
                accumulate::<N>(&weights, &streamed, &mut dv, shape.value_width, shape);
                let dp = dots::<N>(&values, &streamed, shape.value_width, shape);
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
                load(
                    q,
                    &q_rows,
                    query,
                    sizes.scale,
                    &mut streamed,
                    shape.columns,
                    shape.width,
                    shape,
                );
                sync_cube();
                accumulate::<N>(&weights, &streamed, &mut dk, shape.width, shape);
                at += shape.columns as i32;
            }
        }
        let mut factors = Array::<f32>::new(own);
        #[unroll]
        for r in 0..own {
            factors[r] = 1.0f32;
        }
        let dk_rows = head_rows(dk_strides, batch, group, keys);
        let dv_rows = head_rows(dv_strides, batch, group, keys);
        store(
            &dk,
            &factors,
            gradients,
            &dk_rows,
            first,
            add[0],
            shape.width,
            shape,
        );
        store(
            &dv,
            &factors,
            gradients,
            &dv_rows,
            first,
            add[1],
            shape.value_width,
            shape,
        );
    }
}
