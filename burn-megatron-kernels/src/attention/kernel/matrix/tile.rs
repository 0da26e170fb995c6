//! Tiles of the inputs in shared memory, and what a unit owns of a row.

use cubecl::prelude::*;

use super::super::tile::HeadRows;
use super::plan::{MatrixTiles, TILE};
use super::warp_tile::{
    WarpTile, WeightPair, lane_position, multiply, store_to_shared, sync_warp, warp_row, zeros,
};

/// Loads `rows` rows of a head from `first` on, unchanged, to row `0` of a tile; zeros past the last
/// row.
#[cube]
pub(crate) fn load<F: Float, N: Size>(
    from: &[Vector<F, N>],
    head: &HeadRows,
    first: usize,
    tile: &mut Shared<[Vector<F, N>]>,
    #[comptime] rows: usize,
    #[comptime] blocks: MatrixTiles,
) {
    let columns = comptime!(blocks.width / blocks.vector);
    let units = comptime!(blocks.units());
    // Unrolled, so that many loads are under way at once.
    #[unroll]
    for step in 0..(rows * columns).div_ceil(units) {
        let at = UNIT_POS as usize + comptime!(step * units);
        let row = at / columns;
        let column = at % columns;
        if row < rows {
            let mut value = Vector::<F, N>::new(F::new(0.0));
            if first + row < head.count {
                value = from[head.start + (first + row) * head.stride + column];
            }
            tile[row * comptime!(blocks.vectors()) + column] = value;
        }
    }
}

/// The column of this unit's score `index`: the units of a row own alternating pairs of columns.
#[cube]
pub(crate) fn column(half: usize, #[comptime] index: usize) -> usize {
    2 * half + comptime!(index / 2 * 4 + index % 2)
}

/// This unit's products of rows of `left` and of `right`, times `factor`.
#[cube]
pub(crate) fn scores<F: Float, N: Size>(
    left: &Shared<[Vector<F, N>]>,
    right: &Shared<[Vector<F, N>]>,
    scratch: &mut Shared<[f32]>,
    factor: f32,
    #[comptime] blocks: MatrixTiles,
) -> Array<f32> {
    let pitch = comptime!(blocks.pitch());
    let tiles = comptime!(blocks.columns / TILE);
    let mut warp_tile = zeros(tiles, blocks.products);
    multiply::<F, N, N>(
        &mut warp_tile,
        left,
        warp_row() * comptime!(blocks.vectors()),
        pitch,
        right,
        0usize,
        pitch,
        true,
        comptime!(blocks.width),
        tiles,
        blocks.products,
    );
    store_to_shared(
        &warp_tile,
        scratch,
        0usize,
        comptime!(blocks.columns),
        blocks,
    );
    load_scores(&*scratch, factor, blocks)
}

/// Adds the products of the weights with `columns` columns of a streamed tile, from `first` on.
#[cube]
pub(crate) fn accumulate<F: Float, N: Size>(
    sums: &mut WarpTile,
    weights: &Shared<[Vector<F, WeightPair>]>,
    streamed: &Shared<[Vector<F, N>]>,
    #[comptime] first: usize,
    #[comptime] columns: usize,
    #[comptime] blocks: MatrixTiles,
) {
    multiply::<F, WeightPair, N>(
        sums,
        weights,
        warp_row() * comptime!(blocks.weight_pitch() / 2),
        comptime!(blocks.weight_pitch()),
        streamed,
        comptime!(first / blocks.vector),
        comptime!(blocks.pitch()),
        false,
        comptime!(blocks.columns),
        comptime!(columns / TILE),
        blocks.products,
    );
}

/// This unit's values of the warp tile in the scratch memory, times `factor`.
#[cube]
fn load_scores(
    scratch: &Shared<[f32]>,
    factor: f32,
    #[comptime] blocks: MatrixTiles,
) -> Array<f32> {
    let count = comptime!(blocks.columns / 2);
    let (row, half) = lane_position();
    let mut scores = Array::<f32>::new(count);
    #[unroll]
    for i in 0..count {
        let at = row * comptime!(blocks.scratch_pitch()) + column(half, i);
        scores[i] = scratch[at] * factor;
    }
    scores
}

/// Stores this unit's weights, rounded to the type of the products.
#[cube]
pub(crate) fn store_weights<F: Float>(
    values: &Array<f32>,
    weights: &mut Shared<[Vector<F, WeightPair>]>,
    #[comptime] blocks: MatrixTiles,
) {
    let (row, half) = lane_position();
    #[unroll]
    for i in 0..blocks.columns / 4 {
        let mut pair = Vector::<f32, WeightPair>::new(values[comptime!(2 * i)]);
        pair.insert(1usize, values[comptime!(2 * i + 1)]);
        let at = row * comptime!(blocks.weight_pitch() / 2) + half + comptime!(2 * i);
        weights[at] = Vector::cast_from(pair);
    }
    sync_warp(blocks.products);
}

/// This unit's vector number `part` in the scratch memory: the units of a row own alternating
/// vectors.
#[cube]
pub(crate) fn load_vector<N: Size>(
    scratch: &Shared<[f32]>,
    #[comptime] part: usize,
    #[comptime] blocks: MatrixTiles,
) -> Vector<f32, N> {
    let (row, half) = lane_position();
    let at = row * comptime!(blocks.scratch_pitch()) + (half + comptime!(2 * part)) * N::value();
    let mut value = Vector::<f32, N>::new(scratch[at]);
    #[unroll]
    for n in 1..N::value() {
        value.insert(n, scratch[at + n]);
    }
    value
}

/// Stores a warp tile times `factor` to the rows of a head from `first` on.
#[cube]
pub(crate) fn store<F: Float, N: Size>(
    warp_tile: &WarpTile,
    scratch: &mut Shared<[f32]>,
    factor: f32,
    to: &mut [Vector<F, N>],
    head: &HeadRows,
    first: usize,
    #[comptime] blocks: MatrixTiles,
) {
    let (row, half) = lane_position();
    #[unroll]
    for index in 0..blocks.chunks() {
        let chunk = comptime!(blocks.chunk(index));
        sync_warp(blocks.products);
        store_to_shared(
            warp_tile,
            scratch,
            comptime!(chunk[0]),
            comptime!(chunk[1]),
            blocks,
        );
        #[unroll]
        for part in 0..chunk[1] / (2 * blocks.vector) {
            let value = load_vector::<N>(&*scratch, part, blocks) * Vector::new(factor);
            let column = half + comptime!(chunk[0] / blocks.vector + 2 * part);
            if first + row < head.count {
                to[head.start + (first + row) * head.stride + column] = Vector::cast_from(value);
            }
        }
    }
}
