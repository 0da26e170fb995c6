//! The gradient of the queries: these stay, keys and values pass by.

use cubecl::prelude::*;

use super::super::tile::{Reach, Site, high, low, start};
use super::plan::{Blocks, TILE};
use super::strip::{Pair, multiply, place, spread, strip_row, sync_strip, zeros};
use super::tile::{column, keep, load, own_scores, store};

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
    q_site: &Site,
    k_site: &Site,
    v_site: &Site,
    out_site: &Site,
    dq_site: &Site,
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
    let products = comptime!(blocks.products);
    let pitch = comptime!(blocks.pitch());
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
        let strip_at = strip_row() * vectors;
        let mut stays =
            Shared::<[Vector<F, N>]>::new_aligned_slice(comptime!(rows * vectors), 128usize);
        let mut gradient =
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
        let (q_start, out_start) = (start(q_site, batch, head), start(out_site, batch, head));
        let (k_start, v_start) = (start(k_site, batch, group), start(v_site, batch, group));
        let (q_row, out_row) = (q_site.row as usize, out_site.row as usize);
        let (k_row, v_row) = (k_site.row as usize, v_site.row as usize);
        load(q, q_start, q_row, first, queries, &mut stays, rows, blocks);
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
        let seen_from = low(query as i32, reach, bounds);
        let seen_to = high(query as i32, reach, bounds);
        let statistics = (batch * heads as usize + head) * queries + query;
        let row_lse = lse[statistics];
        let row_delta = delta[statistics];
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
            spread(&strip, &mut scratch, 0usize, columns, blocks);
            let mut values = own_scores(&scratch, scale, blocks);
            #[unroll]
            for i in 0..own {
                let j = at + column(half, i) as i32;
                let p = (values[i] - row_lse).exp();
                values[i] = select(j >= seen_from && j < seen_to, p, 0.0f32);
            }
            sync_strip(products);
            let mut strip = zeros(comptime!(columns / TILE), products);
            multiply::<F, N, N>(
                &mut strip,
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
            spread(&strip, &mut scratch, 0usize, columns, blocks);
            let dp = own_scores(&scratch, 1.0f32, blocks);
            #[unroll]
            for i in 0..own {
                values[i] *= dp[i] - row_delta;
            }
            keep::<F>(&values, &mut weights, blocks);
            multiply::<F, Pair, N>(
                &mut sums,
                &weights,
                strip_row() * comptime!(blocks.weight_pitch() / 2),
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
        let (to, stride) = (start(dq_site, batch, head), dq_site.row as usize);
        store(
            &sums,
            &mut scratch,
            scale,
            dq,
            to,
            stride,
            first,
            queries,
            blocks,
        );
    }
}
