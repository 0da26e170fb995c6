//! Output and log-sum-exp: a tile of queries stays, keys and values pass by.

use cubecl::prelude::*;

use super::tile::{
    LANES, Reach, Shape, Site, accumulate, dots, high, load, low, over_lanes, start, store, zeros,
};

/// Below every score. Infinity is no literal of every shader language.
pub(super) const HIDDEN: f32 = -1.0e30;

/// One cube takes `shape.rows` queries of one head. Cubes with the last queries come first: where
/// attention is causal these have the most keys.
#[cube(launch_unchecked)]
pub(crate) fn attention_forward<F: Float, N: Size>(
    q: &[Vector<F, N>],
    k: &[Vector<F, N>],
    v: &[Vector<F, N>],
    sink: &ComptimeOption<OwnedTensor<f32>>,
    bounds: &ComptimeOption<OwnedTensor<i32>>,
    out: &mut [Vector<F, N>],
    lse: &mut [f32],
    q_site: &Site,
    k_site: &Site,
    v_site: &Site,
    out_site: &Site,
    reach: &Reach,
    scale: f32,
    batches: u32,
    heads: u32,
    share: u32,
    #[comptime] shape: Shape,
    #[define(F)] _dtype: ElemType,
) {
    let own = comptime!(shape.own);
    let columns = comptime!(shape.columns_per_unit());
    let parts = comptime!(shape.parts());
    let weight_pitch = comptime!(shape.weight_pitch());
    let queries = reach.rows as usize;
    let keys = reach.columns as usize;
    let tiles = queries.div_ceil(shape.rows);
    let sequences = (batches * heads) as usize;
    let cube = CUBE_POS;
    if cube < tiles * sequences {
        let tile = tiles - 1 - cube / sequences;
        let head = cube % sequences % heads as usize;
        let batch = cube % sequences / heads as usize;
        let group = head / share as usize;
        let first = tile * shape.rows;
        let lane = UNIT_POS as usize % LANES;
        let row = UNIT_POS as usize / LANES * own;

        let mut stays =
            Shared::<[Vector<f32, N>]>::new_slice(comptime!(shape.rows * shape.pitch()));
        let mut passes =
            Shared::<[Vector<f32, N>]>::new_slice(comptime!(shape.columns * shape.pitch()));
        let mut weights = Shared::<[f32]>::new_slice(comptime!(shape.rows * weight_pitch));
        let mut exchange = Shared::<[f32]>::new_slice(comptime!(shape.exchange()));
        let q_start = start(q_site, batch, head);
        let (k_start, v_start) = (start(k_site, batch, group), start(v_site, batch, group));
        let (k_row, v_row) = (k_site.row as usize, v_site.row as usize);
        let q_row = q_site.row as usize;
        load(
            q, q_start, q_row, first, queries, scale, &mut stays, shape.rows, shape,
        );

        let mut sums = zeros::<N>(shape);
        let mut largest = Array::<f32>::new(own);
        let mut totals = Array::<f32>::new(own);
        let mut lows = Array::<i32>::new(own);
        let mut highs = Array::<i32>::new(own);
        #[unroll]
        for r in 0..own {
            largest[r] = HIDDEN;
            totals[r] = 0.0f32;
            let at = min(first + row + r, queries - 1) as i32;
            lows[r] = low(at, reach, bounds);
            highs[r] = high(at, reach, bounds);
        }
        let last = min(first + shape.rows, queries) - 1;
        let mut at = low(first as i32, reach, bounds);
        let end = high(last as i32, reach, bounds);
        while at < end {
            sync_cube();
            let key = at as usize;
            load(
                k,
                k_start,
                k_row,
                key,
                keys,
                1.0f32,
                &mut passes,
                shape.columns,
                shape,
            );
            sync_cube();
            let mut scores = dots::<N>(&stays, &passes, shape);
            let mut most = Array::<f32>::new(own);
            #[unroll]
            for r in 0..own {
                most[r] = largest[r];
                #[unroll]
                for c in 0..columns {
                    let i = comptime!(r * columns + c);
                    let j = at + (lane + c * LANES) as i32;
                    scores[i] = select(j >= lows[r] && j < highs[r], scores[i], HIDDEN);
                    most[r] = max(most[r], scores[i]);
                }
            }
            over_lanes(&mut most, &mut exchange, false, shape);
            #[unroll]
            for r in 0..own {
                let factor = (largest[r] - most[r]).exp();
                largest[r] = most[r];
                totals[r] *= factor;
                #[unroll]
                for c in 0..columns {
                    let score = scores[comptime!(r * columns + c)];
                    let weight = select(score > HIDDEN, (score - most[r]).exp(), 0.0f32);
                    totals[r] += weight;
                    weights[(row + r) * weight_pitch + lane + c * LANES] = weight;
                }
                #[unroll]
                for t in 0..parts {
                    sums[comptime!(r * parts + t)] *= Vector::new(factor);
                }
            }
            sync_cube();
            load(
                v,
                v_start,
                v_row,
                key,
                keys,
                1.0f32,
                &mut passes,
                shape.columns,
                shape,
            );
            sync_cube();
            accumulate::<N>(&weights, &passes, &mut sums, shape);
            at += shape.columns as i32;
        }

        over_lanes(&mut totals, &mut exchange, true, shape);
        let mut factors = Array::<f32>::new(own);
        #[unroll]
        for r in 0..own {
            let mut most = largest[r];
            let mut total = totals[r];
            #[comptime]
            match sink {
                ComptimeOption::Some(sink) => {
                    let logit = sink.as_slice()[head];
                    most = max(most, logit);
                    total = total * (largest[r] - most).exp() + (logit - most).exp();
                }
                ComptimeOption::None => {}
            }
            // Where nothing is seen the sums are 0, and the logarithm minus infinity.
            let seen = select(total > 0.0, total, 1.0f32);
            factors[r] = (largest[r] - most).exp() / seen;
            let query = first + row + r;
            if lane == 0 && query < queries {
                lse[(batch * heads as usize + head) * queries + query] = most + total.ln();
            }
        }
        let out_start = start(out_site, batch, head);
        let out_row = out_site.row as usize;
        store(
            &sums, &factors, out, out_start, out_row, first, queries, shape,
        );
    }
}
