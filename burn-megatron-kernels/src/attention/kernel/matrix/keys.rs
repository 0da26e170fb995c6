//! The gradients of keys and values: these stay, queries and the gradient of the output pass by.

use cubecl::prelude::*;

use super::super::tile::{Reach, Site, high, low, start};
use super::plan::{Blocks, TILE};
use super::strip::{Pair, multiply, place, spread, strip_row, zeros};
use super::tile::{column, keep, load, own_scores, store};

/// `dv = p^T dout` and `dk = scale * ds^T q`: one cube takes `blocks.rows()` keys of one group,
/// each of its planes 16 of them, and all the heads of the group one after the other. `reach` says
/// which queries see a key.
#[cube(launch_unchecked)]
pub(crate) fn matrix_keys<F: Float, N: Size>(
    q: &[Vector<F, N>],
    k: &[Vector<F, N>],
    v: &[Vector<F, N>],
    dout: &[Vector<F, N>],
    lse: &[f32],
    delta: &[f32],
    bounds: &ComptimeOption<OwnedTensor<i32>>,
    gradients: &mut [Vector<F, N>],
    q_site: &Site,
    k_site: &Site,
    v_site: &Site,
    out_site: &Site,
    dk_site: &Site,
    dv_site: &Site,
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
    let weight_pitch = comptime!(blocks.weight_pitch());
    let keys = reach.rows as usize;
    let queries = reach.columns as usize;
    let tiles = keys.div_ceil(rows);
    let groups = (heads / share) as usize;
    let sequences = batches as usize * groups;
    let cube = CUBE_POS;
    if cube < tiles * sequences {
        let first = cube / sequences * rows;
        let group = cube % sequences % groups;
        let batch = cube % sequences / groups;
        let (row, half) = place();

        let vectors = comptime!(blocks.vectors());
        let strip_at = strip_row() * vectors;
        let weights_at = strip_row() * comptime!(weight_pitch / 2);
        let mut stays =
            Shared::<[Vector<F, N>]>::new_aligned_slice(comptime!(rows * vectors), 128usize);
        let mut values =
            Shared::<[Vector<F, N>]>::new_aligned_slice(comptime!(rows * vectors), 128usize);
        let mut query_tile =
            Shared::<[Vector<F, N>]>::new_aligned_slice(comptime!(columns * vectors), 128usize);
        let mut gradient_tile =
            Shared::<[Vector<F, N>]>::new_aligned_slice(comptime!(columns * vectors), 128usize);
        let mut weights = Shared::<[Vector<F, Pair>]>::new_aligned_slice(
            comptime!(rows * weight_pitch / 2),
            128usize,
        );
        let mut scratch =
            Shared::<[f32]>::new_aligned_slice(comptime!(rows * blocks.scratch_pitch()), 128usize);
        // Each unit's own; registers are full with the sums of two gradients.
        let mut kept = Shared::<[f32]>::new_slice(comptime!(rows * blocks.scratch_pitch()));
        let kept_at = row * comptime!(blocks.scratch_pitch());
        let mut tile_lse = Shared::<[f32]>::new_slice(columns);
        let mut tile_delta = Shared::<[f32]>::new_slice(columns);
        let (k_start, v_start) = (start(k_site, batch, group), start(v_site, batch, group));
        let (k_row, v_row) = (k_site.row as usize, v_site.row as usize);
        let (q_row, out_row) = (q_site.row as usize, out_site.row as usize);
        load(k, k_start, k_row, first, keys, &mut stays, rows, blocks);
        load(v, v_start, v_row, first, keys, &mut values, rows, blocks);

        let mut dk = zeros(comptime!(blocks.width / TILE), products);
        let mut dv = zeros(comptime!(blocks.width / TILE), products);
        let key = min(first + row, keys - 1) as i32;
        let seen_from = low(key, reach, bounds);
        let seen_to = high(key, reach, bounds);
        let last = min(first + rows, keys) - 1;
        let begin = low(first as i32, reach, bounds);
        let end = high(last as i32, reach, bounds);
        for member in 0..share as usize {
            let head = group * share as usize + member;
            let (q_start, out_start) = (start(q_site, batch, head), start(out_site, batch, head));
            let statistics = (batch * heads as usize + head) * queries;
            let mut at = begin;
            while at < end {
                let query = at as usize;
                sync_cube();
                load(
                    q,
                    q_start,
                    q_row,
                    query,
                    queries,
                    &mut query_tile,
                    columns,
                    blocks,
                );
                load(
                    dout,
                    out_start,
                    out_row,
                    query,
                    queries,
                    &mut gradient_tile,
                    columns,
                    blocks,
                );
                let mut i = UNIT_POS as usize;
                while i < columns {
                    let from = statistics + min(query + i, queries - 1);
                    tile_lse[i] = lse[from];
                    tile_delta[i] = delta[from];
                    i += comptime!(blocks.units());
                }
                sync_cube();
                let mut strip = zeros(comptime!(columns / TILE), products);
                multiply::<F, N, N>(
                    &mut strip,
                    &stays,
                    strip_at,
                    pitch,
                    &query_tile,
                    0usize,
                    pitch,
                    true,
                    comptime!(blocks.width),
                    comptime!(columns / TILE),
                    products,
                );
                spread(&strip, &mut scratch, 0usize, columns, blocks);
                let mut weight = own_scores(&scratch, scale, blocks);
                #[unroll]
                for i in 0..own {
                    let j = column(half, i);
                    let p = (weight[i] - tile_lse[j]).exp();
                    let j = at + j as i32;
                    weight[i] = select(j >= seen_from && j < seen_to, p, 0.0f32);
                    kept[kept_at + column(half, i)] = weight[i];
                }
                keep::<F>(&weight, &mut weights, blocks);
                multiply::<F, Pair, N>(
                    &mut dv,
                    &weights,
                    weights_at,
                    weight_pitch,
                    &gradient_tile,
                    0usize,
                    pitch,
                    false,
                    columns,
                    comptime!(blocks.width / TILE),
                    products,
                );
                let mut strip = zeros(comptime!(columns / TILE), products);
                multiply::<F, N, N>(
                    &mut strip,
                    &values,
                    strip_at,
                    pitch,
                    &gradient_tile,
                    0usize,
                    pitch,
                    true,
                    comptime!(blocks.width),
                    comptime!(columns / TILE),
                    products,
                );
                // Behind this the weights of before are no longer read.
                spread(&strip, &mut scratch, 0usize, columns, blocks);
                let mut weight = own_scores(&scratch, 1.0f32, blocks);
                #[unroll]
                for i in 0..own {
                    let j = column(half, i);
                    weight[i] = (weight[i] - tile_delta[j]) * kept[kept_at + j];
                }
                keep::<F>(&weight, &mut weights, blocks);
                multiply::<F, Pair, N>(
                    &mut dk,
                    &weights,
                    weights_at,
                    weight_pitch,
                    &query_tile,
                    0usize,
                    pitch,
                    false,
                    columns,
                    comptime!(blocks.width / TILE),
                    products,
                );
                at += columns as i32;
            }
        }
        let (to, stride) = (start(dk_site, batch, group), dk_site.row as usize);
        store(
            &dk,
            &mut scratch,
            scale,
            gradients,
            to,
            stride,
            first,
            keys,
            blocks,
        );
        let (to, stride) = (start(dv_site, batch, group), dv_site.row as usize);
        store(
            &dv,
            &mut scratch,
            1.0f32,
            gradients,
            to,
            stride,
            first,
            keys,
            blocks,
        );
    }
}
