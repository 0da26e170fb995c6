//! Output and log-sum-exp: queries are the resident tile, keys and values are streamed.

use cubecl::prelude::*;

use super::super::forward::{MASKED_SCORE, with_sink};
use super::super::tile::{AttentionSizes, AttentionStrides, head_rows, visible_end, visible_start};
use super::plan::{MatrixTiles, TILE};
use super::tile::{accumulate, column, load, load_vector, scores, store_weights};
use super::warp_tile::{WeightPair, lane_position, reduce_row, store_to_shared, sync_warp, zeros};

/// One cube takes `blocks.rows()` queries of one head, each of its planes 16 of them. Cubes with
/// the last queries come first: where attention is causal these have the most keys.
///
/// The running sums are rescaled row by row as larger scores appear, but the layout of a matrix
/// fragment within the plane is unspecified. So each product goes through shared memory into
/// registers that the two units of a row own.
#[cube(launch_unchecked)]
pub(crate) fn matrix_forward<F: Float, N: Size>(
    q: &[Vector<F, N>],
    k: &[Vector<F, N>],
    v: &[Vector<F, N>],
    sink: &ComptimeOption<OwnedTensor<f32>>,
    bounds: &ComptimeOption<OwnedTensor<i32>>,
    out: &mut [Vector<F, N>],
    lse: &mut [f32],
    strides: &AttentionStrides,
    sizes: &AttentionSizes,
    #[comptime] blocks: MatrixTiles,
    #[define(F)] _dtype: ElemType,
) {
    let rows = comptime!(blocks.rows());
    let columns = comptime!(blocks.columns);
    let own = comptime!(columns / 2);
    let vectors_per_unit = comptime!(blocks.vectors_per_unit());
    let products = comptime!(blocks.products);
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
        let (row, half) = lane_position();

        let vectors = comptime!(blocks.vectors());
        let mut resident =
            Shared::<[Vector<F, N>]>::new_aligned_slice(comptime!(rows * vectors), 128usize);
        let mut key_tile =
            Shared::<[Vector<F, N>]>::new_aligned_slice(comptime!(columns * vectors), 128usize);
        let mut value_tile =
            Shared::<[Vector<F, N>]>::new_aligned_slice(comptime!(columns * vectors), 128usize);
        let mut weights = Shared::<[Vector<F, WeightPair>]>::new_aligned_slice(
            comptime!(rows * blocks.weight_pitch() / 2),
            128usize,
        );
        let mut scratch =
            Shared::<[f32]>::new_aligned_slice(comptime!(rows * blocks.scratch_pitch()), 128usize);
        let mut exchange = Shared::<[f32]>::new_slice(comptime!(blocks.exchange()));
        let q_rows = head_rows(&strides.q, batch, head, queries);
        let k_rows = head_rows(&strides.k, batch, group, keys);
        let v_rows = head_rows(&strides.v, batch, group, keys);
        load(q, &q_rows, first, &mut resident, rows, blocks);

        let mut sums = Array::<Vector<f32, N>>::new(vectors_per_unit);
        #[unroll]
        for part in 0..vectors_per_unit {
            sums[part] = Vector::new(0.0f32);
        }
        let mut largest = f32::new(MASKED_SCORE);
        let mut total = 0.0f32;
        let query = min(first + row, queries - 1) as i32;
        let visible_from = visible_start(query, &sizes.mask_range, bounds);
        let visible_to = visible_end(query, &sizes.mask_range, bounds);
        let last = min(first + rows, queries) - 1;
        let mut at = visible_start(first as i32, &sizes.mask_range, bounds);
        let end = visible_end(last as i32, &sizes.mask_range, bounds);
        while at < end {
            sync_cube();
            let key = at as usize;
            load(k, &k_rows, key, &mut key_tile, columns, blocks);
            load(v, &v_rows, key, &mut value_tile, columns, blocks);
            sync_cube();
            let mut scores = scores(&resident, &key_tile, &mut scratch, sizes.scale, blocks);
            let mut most = largest;
            #[unroll]
            for i in 0..own {
                let j = at + column(half, i) as i32;
                scores[i] = select(j >= visible_from && j < visible_to, scores[i], MASKED_SCORE);
                most = max(most, scores[i]);
            }
            most = reduce_row(most, &mut exchange, false, products);
            let factor = (largest - most).exp();
            largest = most;
            total *= factor;
            #[unroll]
            for i in 0..own {
                let score = scores[i];
                scores[i] = select(score > MASKED_SCORE, (score - most).exp(), 0.0f32);
                total += scores[i];
            }
            store_weights::<F>(&scores, &mut weights, blocks);
            #[unroll]
            for index in 0..blocks.chunks() {
                let chunk = comptime!(blocks.chunk(index));
                let mut warp_tile = zeros(comptime!(chunk[1] / TILE), products);
                accumulate(
                    &mut warp_tile,
                    &weights,
                    &value_tile,
                    comptime!(chunk[0]),
                    comptime!(chunk[1]),
                    blocks,
                );
                store_to_shared(
                    &warp_tile,
                    &mut scratch,
                    0usize,
                    comptime!(chunk[1]),
                    blocks,
                );
                #[unroll]
                for part in 0..chunk[1] / (2 * blocks.vector) {
                    let i = comptime!(chunk[0] / (2 * blocks.vector) + part);
                    let added = load_vector::<N>(&scratch, part, blocks);
                    sums[i] = fma(sums[i], Vector::new(factor), added);
                }
                sync_warp(products);
            }
            at += columns as i32;
        }

        total = reduce_row(total, &mut exchange, true, products);
        let (factor, most, total) = with_sink(largest, total, sink, head);
        if first + row < queries {
            if half == 0 {
                lse[(batch * sizes.heads as usize + head) * queries + first + row] =
                    most + total.ln();
            }
            let out_rows = head_rows(&strides.out, batch, head, queries);
            let to = out_rows.start + (first + row) * out_rows.stride + half;
            #[unroll]
            for part in 0..vectors_per_unit {
                out[to + comptime!(2 * part)] = Vector::cast_from(sums[part] * Vector::new(factor));
            }
        }
    }
}
