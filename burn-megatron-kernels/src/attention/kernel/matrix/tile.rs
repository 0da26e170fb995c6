//! Tiles of the inputs in shared memory, and what a unit owns of a row.

use cubecl::prelude::*;

use super::plan::Blocks;
use super::strip::{Pair, Strip, place, spread, sync_strip};

/// Loads `rows` rows from `first` on to row `0` of a tile, as they are; what is past `count` rows
/// becomes 0.
#[cube]
pub(crate) fn load<F: Float, N: Size>(
    from: &[Vector<F, N>],
    start: usize,
    stride: usize,
    first: usize,
    count: usize,
    tile: &mut Shared<[Vector<F, N>]>,
    #[comptime] rows: usize,
    #[comptime] blocks: Blocks,
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
            if first + row < count {
                value = from[start + (first + row) * stride + column];
            }
            tile[row * comptime!(blocks.vectors()) + column] = value;
        }
    }
}

/// The column of the unit's score `index`: units of a row own pairs of columns in turn.
#[cube]
pub(crate) fn column(half: usize, #[comptime] index: usize) -> usize {
    2 * half + comptime!(index / 2 * 4 + index % 2)
}

/// The unit's values of the strip in the scratch, times `factor`.
#[cube]
pub(crate) fn own_scores(
    scratch: &Shared<[f32]>,
    factor: f32,
    #[comptime] blocks: Blocks,
) -> Array<f32> {
    let count = comptime!(blocks.columns / 2);
    let (row, half) = place();
    let mut scores = Array::<f32>::new(count);
    #[unroll]
    for i in 0..count {
        let at = row * comptime!(blocks.scratch_pitch()) + column(half, i);
        scores[i] = scratch[at] * factor;
    }
    scores
}

/// Writes the unit's weights, rounded to the type of the products.
#[cube]
pub(crate) fn keep<F: Float>(
    values: &Array<f32>,
    weights: &mut Shared<[Vector<F, Pair>]>,
    #[comptime] blocks: Blocks,
) {
    let (row, half) = place();
    #[unroll]
    for i in 0..blocks.columns / 4 {
        let mut pair = Vector::<f32, Pair>::new(values[comptime!(2 * i)]);
        pair.insert(1usize, values[comptime!(2 * i + 1)]);
        let at = row * comptime!(blocks.weight_pitch() / 2) + half + comptime!(2 * i);
        weights[at] = Vector::cast_from(pair);
    }
    sync_strip(blocks.products);
}

/// The unit's `part`th vector of what the scratch holds: units of a row own vectors in turn.
#[cube]
pub(crate) fn own_part<N: Size>(
    scratch: &Shared<[f32]>,
    #[comptime] part: usize,
    #[comptime] blocks: Blocks,
) -> Vector<f32, N> {
    let (row, half) = place();
    let at = row * comptime!(blocks.scratch_pitch()) + (half + comptime!(2 * part)) * N::value();
    let mut value = Vector::<f32, N>::new(scratch[at]);
    #[unroll]
    for n in 1..N::value() {
        value.insert(n, scratch[at + n]);
    }
    value
}

/// Writes a strip times `factor` to the rows of a head from `first` on.
#[cube]
pub(crate) fn store<F: Float, N: Size>(
    strip: &Strip,
    scratch: &mut Shared<[f32]>,
    factor: f32,
    to: &mut [Vector<F, N>],
    start: usize,
    stride: usize,
    first: usize,
    count: usize,
    #[comptime] blocks: Blocks,
) {
    let (row, half) = place();
    #[unroll]
    for index in 0..blocks.chunks() {
        let chunk = comptime!(blocks.chunk(index));
        sync_strip(blocks.products);
        spread(
            strip,
            scratch,
            comptime!(chunk[0]),
            comptime!(chunk[1]),
            blocks,
        );
        #[unroll]
        for part in 0..chunk[1] / (2 * blocks.vector) {
            let value = own_part::<N>(&*scratch, part, blocks) * Vector::new(factor);
            let column = half + comptime!(chunk[0] / blocks.vector + 2 * part);
            if first + row < count {
                to[start + (first + row) * stride + column] = Vector::cast_from(value);
            }
        }
    }
}
