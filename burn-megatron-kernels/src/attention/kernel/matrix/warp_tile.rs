//! Warp tiles of 16 rows and their products, by matrix units or by loops.

use cubecl::cmma::{self, Matrix, MatrixIdent, MatrixLayout};
use cubecl::prelude::*;

use super::plan::{MatrixTiles, TILE, TileMultiplier, WARP_UNITS};

/// Two adjacent weights, stored together by one unit.
pub(crate) type WeightPair = Const<2>;

/// Accumulators in f32 of 16 rows and a multiple of 16 columns, distributed over the units of a
/// plane.
#[derive(CubeType)]
pub(crate) struct WarpTile {
    /// One for every 16 columns, with [`TileMultiplier::MatrixUnits`].
    matrices: Sequence<Matrix<f32>>,
    /// With [`TileMultiplier::Loops`]: eight adjacent values of a row for every 16 columns.
    values: Array<f32>,
}

/// Values of a unit in a tile of 16 by 16.
const VALUES_PER_UNIT: usize = TILE * TILE / WARP_UNITS;

/// The row of this unit in its warp tile, and which of the two units of the row it is.
#[cube]
pub(crate) fn lane_position() -> (usize, usize) {
    let lane = UNIT_POS as usize % WARP_UNITS;
    (UNIT_POS as usize / WARP_UNITS * TILE + lane / 2, lane % 2)
}

/// The first row of this unit's warp tile.
#[cube]
pub(crate) fn warp_row() -> usize {
    UNIT_POS as usize / WARP_UNITS * TILE
}

/// Synchronises the units of a warp tile: their writes to shared memory are visible afterwards.
#[cube]
pub(crate) fn sync_warp(#[comptime] products: TileMultiplier) {
    if comptime!(products == TileMultiplier::MatrixUnits) {
        sync_plane();
    } else {
        sync_cube();
    }
}

/// Sums of `tiles` times 16 columns, all 0.
#[cube]
pub(crate) fn zeros(#[comptime] tiles: usize, #[comptime] products: TileMultiplier) -> WarpTile {
    let count = comptime!(match products {
        TileMultiplier::MatrixUnits => 1,
        TileMultiplier::Loops => tiles * VALUES_PER_UNIT,
    });
    let mut matrices = Sequence::<Matrix<f32>>::new();
    let mut values = Array::<f32>::new(count);
    if comptime!(products == TileMultiplier::MatrixUnits) {
        #[unroll]
        for _ in 0..tiles {
            matrices.push(Matrix::<f32>::from_value(
                MatrixIdent::Accumulator,
                TILE,
                TILE,
                TILE,
                MatrixLayout::Undefined,
                0.0f32,
            ));
        }
    } else {
        for i in 0..count {
            values[i] = 0.0f32;
        }
    }
    WarpTile { matrices, values }
}

/// Adds `left right` to a warp tile of `tiles` times 16 columns, summed over `depth`.
///
/// `left` holds the 16 rows of the warp tile from the vector `left_at` on, `right` the other factor
/// from `right_at` on: `[depth, columns]`, or `[columns, depth]` if `transposed`. Pitches are in
/// elements.
#[cube]
pub(crate) fn multiply<F: Float, L: Size, R: Size>(
    warp_tile: &mut WarpTile,
    left: &Shared<[Vector<F, L>]>,
    left_at: usize,
    #[comptime] left_pitch: usize,
    right: &Shared<[Vector<F, R>]>,
    right_at: usize,
    #[comptime] right_pitch: usize,
    #[comptime] transposed: bool,
    #[comptime] depth: usize,
    #[comptime] tiles: usize,
    #[comptime] products: TileMultiplier,
) {
    let of_left = L::value().comptime();
    let of_right = R::value().comptime();
    if comptime!(products == TileMultiplier::MatrixUnits) {
        let layout = comptime!(if transposed {
            MatrixLayout::ColMajor
        } else {
            MatrixLayout::RowMajor
        });
        #[unroll]
        for k in 0..depth / TILE {
            let mut a = unsafe {
                Matrix::<F>::uninitialized(MatrixIdent::A, TILE, TILE, TILE, MatrixLayout::RowMajor)
            };
            let at = left_at + comptime!(k * TILE / of_left);
            cmma::load(&mut a, &left[at..left.len()], left_pitch as u32);
            #[unroll]
            for tile in 0..tiles {
                let step = comptime!(if transposed {
                    (tile * right_pitch + k) * TILE / of_right
                } else {
                    (k * right_pitch + tile) * TILE / of_right
                });
                let at = right_at + step;
                let mut b =
                    unsafe { Matrix::<F>::uninitialized(MatrixIdent::B, TILE, TILE, TILE, layout) };
                cmma::load(&mut b, &right[at..right.len()], right_pitch as u32);
                let sums = warp_tile.matrices.index(tile);
                cmma::execute(&a, &b, sums, sums);
            }
        }
    } else {
        let lane = UNIT_POS as usize % WARP_UNITS;
        for own in 0..tiles * VALUES_PER_UNIT {
            let column =
                own / VALUES_PER_UNIT * TILE + lane % 2 * VALUES_PER_UNIT + own % VALUES_PER_UNIT;
            let mut sum = warp_tile.values[own];
            for k in 0..depth {
                let from = if comptime!(transposed) {
                    column * right_pitch + k
                } else {
                    k * right_pitch + column
                };
                let a = element::<F, L>(left, left_at, lane / 2 * left_pitch + k);
                let b = element::<F, R>(right, right_at, from);
                sum = fma(a, b, sum);
            }
            warp_tile.values[own] = sum;
        }
    }
}

/// The element at `index`, counted from the vector `at` on.
#[cube]
fn element<F: Float, N: Size>(tile: &Shared<[Vector<F, N>]>, at: usize, index: usize) -> f32 {
    let lanes = N::value();
    let vector = tile[at + index / lanes];
    let mut value = 0.0f32;
    #[unroll]
    for n in 0..lanes {
        value = select(index % lanes == n, f32::cast_from(vector.extract(n)), value);
    }
    value
}

/// Stores `columns` columns of a warp tile, from `first` on, to its rows of the scratch memory.
#[cube]
pub(crate) fn store_to_shared(
    warp_tile: &WarpTile,
    scratch: &mut Shared<[f32]>,
    #[comptime] first: usize,
    #[comptime] columns: usize,
    #[comptime] blocks: MatrixTiles,
) {
    let pitch = comptime!(blocks.scratch_pitch());
    let from = comptime!(first / TILE);
    if comptime!(blocks.products == TileMultiplier::MatrixUnits) {
        let end = scratch.len();
        #[unroll]
        for tile in 0..columns / TILE {
            let at = warp_row() * pitch + comptime!(tile * TILE);
            cmma::store(
                &mut scratch[at..end],
                warp_tile.matrices.index(comptime!(from + tile)),
                pitch as u32,
                MatrixLayout::RowMajor,
            );
        }
    } else {
        let (row, half) = lane_position();
        for own in 0..columns / TILE * VALUES_PER_UNIT {
            let column =
                own / VALUES_PER_UNIT * TILE + half * VALUES_PER_UNIT + own % VALUES_PER_UNIT;
            scratch[row * pitch + column] =
                warp_tile.values[comptime!(from * VALUES_PER_UNIT) + own];
        }
    }
    sync_warp(blocks.products);
}

/// The maximum over the two units of a row, or their sum; both units get it.
#[cube]
pub(crate) fn reduce_row(
    value: f32,
    exchange: &mut Shared<[f32]>,
    #[comptime] sum: bool,
    #[comptime] products: TileMultiplier,
) -> f32 {
    let other = if comptime!(products == TileMultiplier::MatrixUnits) {
        plane_shuffle_xor(value, 1u32)
    } else {
        exchange[UNIT_POS as usize] = value;
        sync_cube();
        let other = exchange[(UNIT_POS ^ 1u32) as usize];
        sync_cube();
        other
    };
    if comptime!(sum) {
        value + other
    } else {
        max(value, other)
    }
}
