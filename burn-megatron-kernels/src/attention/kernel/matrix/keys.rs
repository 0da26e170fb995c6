//! The gradients of keys and values: they are the resident tile, queries and the gradient of the
//! output are streamed.

use cubecl::prelude::*;

use super::super::tile::{
    AttentionSizes, AttentionStrides, DeviceStrides, head_rows, visible_end, visible_start,
};
use super::plan::{MatrixTiles, TILE};
use super::tile::{accumulate, column, load, scores, store, store_weights};
use super::warp_tile::{WeightPair, lane_position, zeros};

/// `dv = p^T dout` and `dk = scale * ds^T q`: one cube takes `blocks.rows()` keys of one group,
/// each of its planes 16 of them, and all the heads of the group one after the other. `sizes.mask_range`:
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
    strides: &AttentionStrides,
    dk_strides: &DeviceStrides,
    dv_strides: &DeviceStrides,
    sizes: &AttentionSizes,
    #[comptime] blocks: MatrixTiles,
    #[define(F)] _dtype: ElemType,
) {
    let rows = comptime!(blocks.rows());
    let columns = comptime!(blocks.columns);
    let own = comptime!(columns / 2);
    let products = comptime!(blocks.products);
    let width = comptime!(blocks.width);
    let keys = sizes.mask_range.rows as usize;
    let queries = sizes.mask_range.columns as usize;
    let tiles = keys.div_ceil(rows);
    let groups = (sizes.heads / sizes.heads_per_group) as usize;
    let sequences = sizes.batches as usize * groups;
    let cube = CUBE_POS;
    if cube < tiles * sequences {
        let first = cube / sequences * rows;
        let group = cube % sequences % groups;
        let batch = cube % sequences / groups;
        let (row, half) = lane_position();

        let vectors = comptime!(blocks.vectors());
        let mut resident =
            Shared::<[Vector<F, N>]>::new_aligned_slice(comptime!(rows * vectors), 128usize);
        let mut values =
            Shared::<[Vector<F, N>]>::new_aligned_slice(comptime!(rows * vectors), 128usize);
        let mut query_tile =
            Shared::<[Vector<F, N>]>::new_aligned_slice(comptime!(columns * vectors), 128usize);
        let mut gradient_tile =
            Shared::<[Vector<F, N>]>::new_aligned_slice(comptime!(columns * vectors), 128usize);
        let mut weights = Shared::<[Vector<F, WeightPair>]>::new_aligned_slice(
            comptime!(rows * blocks.weight_pitch() / 2),
            128usize,
        );
        let mut scratch =
            Shared::<[f32]>::new_aligned_slice(comptime!(rows * blocks.scratch_pitch()), 128usize);
        // Per unit, in shared memory: the sums of two gradients fill the registers.
        let mut kept = Shared::<[f32]>::new_slice(comptime!(rows * blocks.scratch_pitch()));
        let kept_at = row * comptime!(blocks.scratch_pitch());
        let mut tile_lse = Shared::<[f32]>::new_slice(columns);
        let mut tile_delta = Shared::<[f32]>::new_slice(columns);
        let k_rows = head_rows(&strides.k, batch, group, keys);
        let v_rows = head_rows(&strides.v, batch, group, keys);
        load(k, &k_rows, first, &mut resident, rows, blocks);
        load(v, &v_rows, first, &mut values, rows, blocks);

        let mut dk = zeros(comptime!(width / TILE), products);
        let mut dv = zeros(comptime!(width / TILE), products);
        let key = min(first + row, keys - 1) as i32;
        let visible_from = visible_start(key, &sizes.mask_range, bounds);
        let visible_to = visible_end(key, &sizes.mask_range, bounds);
        let last = min(first + rows, keys) - 1;
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
                load(q, &q_rows, query, &mut query_tile, columns, blocks);
                load(dout, &out_rows, query, &mut gradient_tile, columns, blocks);
                let mut i = UNIT_POS as usize;
                while i < columns {
                    let from = statistics + min(query + i, queries - 1);
                    tile_lse[i] = lse[from];
                    tile_delta[i] = delta[from];
                    i += comptime!(blocks.units());
                }
                sync_cube();
                let mut weight = scores(&resident, &query_tile, &mut scratch, sizes.scale, blocks);
                #[unroll]
                for i in 0..own {
                    let j = column(half, i);
                    let p = (weight[i] - tile_lse[j]).exp();
                    let j = at + j as i32;
                    weight[i] = select(j >= visible_from && j < visible_to, p, 0.0f32);
                    kept[kept_at + column(half, i)] = weight[i];
                }
                store_weights::<F>(&weight, &mut weights, blocks);
                accumulate(&mut dv, &weights, &gradient_tile, 0usize, width, blocks);
                // Behind this the weights of before are no longer read.
                let mut weight = scores(&values, &gradient_tile, &mut scratch, 1.0f32, blocks);
                #[unroll]
                for i in 0..own {
                    let j = column(half, i);
                    weight[i] = (weight[i] - tile_delta[j]) * kept[kept_at + j];
                }
                store_weights::<F>(&weight, &mut weights, blocks);
                accumulate(&mut dk, &weights, &query_tile, 0usize, width, blocks);
                at += columns as i32;
            }
        }
        let dk_rows = head_rows(dk_strides, batch, group, keys);
        let dv_rows = head_rows(dv_strides, batch, group, keys);
        store(
            &dk,
            &mut scratch,
            sizes.scale,
            gradients,
            &dk_rows,
            first,
            blocks,
        );
        store(
            &dv,
            &mut scratch,
            1.0f32,
            gradients,
            &dv_rows,
            first,
            blocks,
        );
    }
}
