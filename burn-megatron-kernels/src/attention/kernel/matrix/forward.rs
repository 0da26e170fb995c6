//! Output and log-sum-exp: a tile of queries stays, keys and values pass by.

use cubecl::prelude::*;

use super::super::forward::HIDDEN;
use super::super::tile::{Reach, Site, high, low, start};
use super::plan::{Blocks, TILE};
use super::strip::{Pair, multiply, over_row, place, spread, strip_row, sync_strip, zeros};
use super::tile::{column, keep, load, own_part, own_scores};

/// One cube takes `blocks.rows()` queries of one head, each of its planes 16 of them. Cubes with
/// the last queries come first: where attention is causal these have the most keys.
///
/// A plane's sums would be scaled row by row as larger scores come, and nobody knows where in the
/// plane the matrix units keep a row: so each product goes through shared memory into registers
/// that a row's two units own.
#[cube(launch_unchecked)]
pub(crate) fn matrix_forward<F: Float, N: Size>(
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
    #[comptime] blocks: Blocks,
    #[define(F)] _dtype: ElemType,
) {
    let rows = comptime!(blocks.rows());
    let columns = comptime!(blocks.columns);
    let own = comptime!(columns / 2);
    let parts = comptime!(blocks.parts());
    let products = comptime!(blocks.products);
    let queries = reach.rows as usize;
    let keys = reach.columns as usize;
    let tiles = queries.div_ceil(rows);
    let sequences = (batches * heads) as usize;
    let cube = CUBE_POS;
    if cube < tiles * sequences {
        let first = (tiles - 1 - cube / sequences) * rows;
        let head = cube % sequences % heads as usize;
        let batch = cube % sequences / heads as usize;
        let group = head / share as usize;
        let (row, half) = place();

        let vectors = comptime!(blocks.vectors());
        let mut stays =
            Shared::<[Vector<F, N>]>::new_aligned_slice(comptime!(rows * vectors), 128usize);
        let mut key_tile =
            Shared::<[Vector<F, N>]>::new_aligned_slice(comptime!(columns * vectors), 128usize);
        let mut value_tile =
            Shared::<[Vector<F, N>]>::new_aligned_slice(comptime!(columns * vectors), 128usize);
        let mut weights = Shared::<[Vector<F, Pair>]>::new_aligned_slice(
            comptime!(rows * blocks.weight_pitch() / 2),
            128usize,
        );
        let mut scratch =
            Shared::<[f32]>::new_aligned_slice(comptime!(rows * blocks.scratch_pitch()), 128usize);
        let mut exchange = Shared::<[f32]>::new_slice(comptime!(blocks.exchange()));
        let q_start = start(q_site, batch, head);
        let (k_start, v_start) = (start(k_site, batch, group), start(v_site, batch, group));
        let (k_row, v_row) = (k_site.row as usize, v_site.row as usize);
        let q_row = q_site.row as usize;
        load(q, q_start, q_row, first, queries, &mut stays, rows, blocks);

        let mut sums = Array::<Vector<f32, N>>::new(parts);
        #[unroll]
        for part in 0..parts {
            sums[part] = Vector::new(0.0f32);
        }
        let mut largest = f32::new(HIDDEN);
        let mut total = 0.0f32;
        let query = min(first + row, queries - 1) as i32;
        let seen_from = low(query, reach, bounds);
        let seen_to = high(query, reach, bounds);
        let last = min(first + rows, queries) - 1;
        let mut at = low(first as i32, reach, bounds);
        let end = high(last as i32, reach, bounds);
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
            let mut strip = zeros(comptime!(columns / TILE), products);
            multiply::<F, N, N>(
                &mut strip,
                &stays,
                strip_row() * vectors,
                comptime!(blocks.pitch()),
                &key_tile,
                0usize,
                comptime!(blocks.pitch()),
                true,
                comptime!(blocks.width),
                comptime!(columns / TILE),
                products,
            );
            spread(&strip, &mut scratch, 0usize, columns, blocks);
            let mut scores = own_scores(&scratch, scale, blocks);
            let mut most = largest;
            #[unroll]
            for i in 0..own {
                let j = at + column(half, i) as i32;
                scores[i] = select(j >= seen_from && j < seen_to, scores[i], HIDDEN);
                most = max(most, scores[i]);
            }
            most = over_row(most, &mut exchange, false, products);
            let factor = (largest - most).exp();
            largest = most;
            total *= factor;
            #[unroll]
            for i in 0..own {
                let score = scores[i];
                scores[i] = select(score > HIDDEN, (score - most).exp(), 0.0f32);
                total += scores[i];
            }
            keep::<F>(&scores, &mut weights, blocks);
            #[unroll]
            for index in 0..blocks.chunks() {
                let chunk = comptime!(blocks.chunk(index));
                let mut strip = zeros(comptime!(chunk[1] / TILE), products);
                multiply::<F, Pair, N>(
                    &mut strip,
                    &weights,
                    strip_row() * comptime!(blocks.weight_pitch() / 2),
                    comptime!(blocks.weight_pitch()),
                    &value_tile,
                    comptime!(chunk[0] / blocks.vector),
                    comptime!(blocks.pitch()),
                    false,
                    columns,
                    comptime!(chunk[1] / TILE),
                    products,
                );
                spread(&strip, &mut scratch, 0usize, comptime!(chunk[1]), blocks);
                #[unroll]
                for part in 0..chunk[1] / (2 * blocks.vector) {
                    let i = comptime!(chunk[0] / (2 * blocks.vector) + part);
                    let added = own_part::<N>(&scratch, part, blocks);
                    sums[i] = fma(sums[i], Vector::new(factor), added);
                }
                sync_strip(products);
            }
            at += columns as i32;
        }

        total = over_row(total, &mut exchange, true, products);
        let mut most = largest;
        #[comptime]
        match sink {
            ComptimeOption::Some(sink) => {
                let logit = sink.as_slice()[head];
                most = max(most, logit);
                total = total * (largest - most).exp() + (logit - most).exp();
            }
            ComptimeOption::None => {}
        }
        // Where nothing is seen the sums are 0, and the logarithm minus infinity.
        let seen = select(total > 0.0, total, 1.0f32);
        let factor = (largest - most).exp() / seen;
        if first + row < queries {
            if half == 0 {
                lse[(batch * heads as usize + head) * queries + first + row] = most + total.ln();
            }
            let to = start(out_site, batch, head) + (first + row) * out_site.row as usize + half;
            #[unroll]
            for part in 0..parts {
                out[to + comptime!(2 * part)] = Vector::cast_from(sums[part] * Vector::new(factor));
            }
        }
    }
}
