//! The forward kernel, which computes the output, the log-sum-exp and the largest score. It keeps a tile of queries in
//! shared memory (the resident tile) and streams tiles of keys and values.

use cubecl::prelude::*;

use super::tile::{
    AttentionSizes, AttentionStrides, LANES, Tile, TileShape, accumulate, block, block_count, dots,
    head_rows, reduce_lanes, store, vectors_per_unit, visible_end, visible_start, zeros,
};

/// A value below every score. It is finite because not every shading language has a literal for infinity.
pub(super) const MASKED_SCORE: f32 = -1.0e30;

/// Computes the output for `shape.rows` queries of one head per cube.
///
/// The cubes with the last queries come first, because with causal attention they have the most
/// keys.
#[cube(launch_unchecked)]
pub(crate) fn attention_forward<F: Float, N: Size>(
    q: &[Vector<F, N>],
    k: &[Vector<F, N>],
    v: &[Vector<F, N>],
    sink: &ComptimeOption<OwnedTensor<f32>>,
    bounds: &ComptimeOption<OwnedTensor<i32>>,
    out: &mut [Vector<F, N>],
    lse: &mut [f32],
    strides: &AttentionStrides,
    sizes: &AttentionSizes,
    #[comptime] shape: TileShape,
    #[comptime] with_max: bool,
    #[define(F)] _dtype: ElemType,
) {
    let own = comptime!(shape.own);
    let columns = comptime!(shape.columns_per_unit());
    let values = comptime!(shape.value_width);
    let vectors_per_unit = comptime!(vectors_per_unit(values));
    let weight_pitch = comptime!(shape.weight_pitch());
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
        let mut streamed = Tile::<N>::new(shape.columns, shape);
        let mut weights = Shared::<[f32]>::new_slice(comptime!(shape.rows * weight_pitch));
        let mut exchange = Shared::<[f32]>::new_slice(comptime!(shape.exchange()));
        let q_rows = head_rows(&strides.q, batch, head, queries);
        let k_rows = head_rows(&strides.k, batch, group, keys);
        let v_rows = head_rows(&strides.v, batch, group, keys);
        resident.load(q, &q_rows, first, sizes.scale, shape.width);

        let mut sums = zeros::<N>(values, shape);
        let mut largest = Array::<f32>::new(own);
        let mut totals = Array::<f32>::new(own);
        let mut lows = Array::<i32>::new(own);
        let mut highs = Array::<i32>::new(own);
        #[unroll]
        for r in 0..own {
            largest[r] = MASKED_SCORE;
            totals[r] = 0.0f32;
            let at = min(first + row + r, queries - 1) as i32;
            lows[r] = visible_start(at, &sizes.mask_range, bounds);
            highs[r] = visible_end(at, &sizes.mask_range, bounds);
        }
        let mut at = block.start;
        while at < block.end {
            sync_cube();
            let key = at as usize;
            streamed.load(k, &k_rows, key, 1.0f32, shape.width);
            sync_cube();
            let mut scores = dots::<N>(&resident, &streamed, shape.width, shape);
            let mut most = Array::<f32>::new(own);
            #[unroll]
            for r in 0..own {
                most[r] = largest[r];
                #[unroll]
                for c in 0..columns {
                    let i = comptime!(r * columns + c);
                    let j = at + (lane + c * LANES) as i32;
                    scores[i] = select(j >= lows[r] && j < highs[r], scores[i], MASKED_SCORE);
                    most[r] = max(most[r], scores[i]);
                }
            }
            reduce_lanes(&mut most, &mut exchange, false, shape);
            #[unroll]
            for r in 0..own {
                let factor = (largest[r] - most[r]).exp();
                largest[r] = most[r];
                totals[r] *= factor;
                #[unroll]
                for c in 0..columns {
                    let score = scores[comptime!(r * columns + c)];
                    let weight = select(score > MASKED_SCORE, (score - most[r]).exp(), 0.0f32);
                    totals[r] += weight;
                    weights[(row + r) * weight_pitch + lane + c * LANES] = weight;
                }
                #[unroll]
                for t in 0..vectors_per_unit {
                    sums[comptime!(r * vectors_per_unit + t)] *= Vector::new(factor);
                }
            }
            sync_cube();
            streamed.load(v, &v_rows, key, 1.0f32, values);
            sync_cube();
            accumulate::<N>(&weights, &streamed, &mut sums, values, shape);
            at += shape.columns as i32;
        }

        reduce_lanes(&mut totals, &mut exchange, true, shape);
        let mut factors = Array::<f32>::new(own);
        #[unroll]
        for r in 0..own {
            let (factor, most, total) = with_sink(largest[r], totals[r], sink, head);
            factors[r] = factor;
            let query = first + row + r;
            if lane == 0 && query < queries {
                let at = (batch * heads + head) * queries + query;
                lse[at] = most + total.ln();
                if comptime!(with_max) {
                    lse[sizes.batches as usize * heads * queries + at] = largest[r];
                }
            }
        }
        let out_rows = head_rows(&strides.out, batch, head, queries);
        store(&sums, &factors, out, &out_rows, first, false, values, shape);
    }
}

/// Returns the factor for the sums of a row, the largest score of the row, and the total, all including the sink of the
/// head.
#[cube]
pub(super) fn with_sink(
    largest: f32,
    total: f32,
    sink: &ComptimeOption<OwnedTensor<f32>>,
    head: usize,
) -> (f32, f32, f32) {
    let mut most = largest;
    let mut total = total;
    #[comptime]
    match sink {
        ComptimeOption::Some(sink) => {
            let logit = sink.as_slice()[head];
            most = max(most, logit);
            total = total * (largest - most).exp() + (logit - most).exp();
        }
        ComptimeOption::None => {}
    }
    // If no key is visible, the sums are 0 and the logarithm is minus infinity.
    let seen = select(total > 0.0, total, 1.0f32);
    ((largest - most).exp() / seen, most, total)
}
