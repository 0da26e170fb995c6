//! Strips of 16 rows and their products, by matrix units or by loops.

use cubecl::cmma::{self, Matrix, MatrixIdent, MatrixLayout};
use cubecl::prelude::*;

use super::plan::{Blocks, Products, STRIP, TILE};

/// Two weights side by side: what a unit writes at once.
pub(crate) type Pair = Const<2>;

/// Sums in f32 of 16 rows and a few times 16 columns, spread over the units of a plane.
#[derive(CubeType)]
pub(crate) struct Strip {
    /// One for every 16 columns, with [`Products::Units`].
    matrices: Sequence<Matrix<f32>>,
    /// With [`Products::Loops`] eight neighbours of a row for every 16 columns.
    values: Array<f32>,
}

/// Values of a unit in a tile of 16 by 16.
const OWN: usize = TILE * TILE / STRIP;

/// Where a unit stands in its strip: the row, and which of the row's two units it is.
#[cube]
pub(crate) fn place() -> (usize, usize) {
    let lane = UNIT_POS as usize % STRIP;
    (UNIT_POS as usize / STRIP * TILE + lane / 2, lane % 2)
}

/// The first row of the unit's strip.
#[cube]
pub(crate) fn strip_row() -> usize {
    UNIT_POS as usize / STRIP * TILE
}

/// Waits for the units of the strip; what they wrote to shared memory is seen behind it.
#[cube]
pub(crate) fn sync_strip(#[comptime] products: Products) {
    if comptime!(products == Products::Units) {
        sync_plane();
    } else {
        sync_cube();
    }
}

/// Sums of `tiles` times 16 columns, all 0.
#[cube]
pub(crate) fn zeros(#[comptime] tiles: usize, #[comptime] products: Products) -> Strip {
    let count = comptime!(match products {
        Products::Units => 1,
        Products::Loops => tiles * OWN,
    });
    let mut matrices = Sequence::<Matrix<f32>>::new();
    let mut values = Array::<f32>::new(count);
    if comptime!(products == Products::Units) {
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
    Strip { matrices, values }
}

/// Adds `left right` to a strip of `tiles` times 16 columns, summed over `depth`.
///
/// `left` holds the strip's 16 rows from the vector `left_at` on, `right` the other factor from
/// `right_at` on: `[depth, columns]`, or where `transposed` `[columns, depth]`. Pitches are in
/// elements.
#[cube]
pub(crate) fn multiply<F: Float, L: Size, R: Size>(
    strip: &mut Strip,
    left: &Shared<[Vector<F, L>]>,
    left_at: usize,
    #[comptime] left_pitch: usize,
    right: &Shared<[Vector<F, R>]>,
    right_at: usize,
    #[comptime] right_pitch: usize,
    #[comptime] transposed: bool,
    #[comptime] depth: usize,
    #[comptime] tiles: usize,
    #[comptime] products: Products,
) {
    let of_left = L::value().comptime();
    let of_right = R::value().comptime();
    if comptime!(products == Products::Units) {
        let layout = comptime!(match transposed {
            true => MatrixLayout::ColMajor,
            false => MatrixLayout::RowMajor,
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
                let step = comptime!(match transposed {
                    true => (tile * right_pitch + k) * TILE / of_right,
                    false => (k * right_pitch + tile) * TILE / of_right,
                });
                let at = right_at + step;
                let mut b =
                    unsafe { Matrix::<F>::uninitialized(MatrixIdent::B, TILE, TILE, TILE, layout) };
                cmma::load(&mut b, &right[at..right.len()], right_pitch as u32);
                let sums = strip.matrices.index(tile);
                cmma::execute(&a, &b, sums, sums);
            }
        }
    } else {
        let lane = UNIT_POS as usize % STRIP;
        for own in 0..tiles * OWN {
            let column = own / OWN * TILE + lane % 2 * OWN + own % OWN;
            let mut sum = strip.values[own];
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
            strip.values[own] = sum;
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

/// Writes `columns` columns of a strip from `first` on to the strip's rows of the scratch.
#[cube]
pub(crate) fn spread(
    strip: &Strip,
    scratch: &mut Shared<[f32]>,
    #[comptime] first: usize,
    #[comptime] columns: usize,
    #[comptime] blocks: Blocks,
) {
    let pitch = comptime!(blocks.scratch_pitch());
    let from = comptime!(first / TILE);
    if comptime!(blocks.products == Products::Units) {
        let end = scratch.len();
        #[unroll]
        for tile in 0..columns / TILE {
            let at = strip_row() * pitch + comptime!(tile * TILE);
            cmma::store(
                &mut scratch[at..end],
                strip.matrices.index(comptime!(from + tile)),
                pitch as u32,
                MatrixLayout::RowMajor,
            );
        }
    } else {
        let (row, half) = place();
        for own in 0..columns / TILE * OWN {
            let column = own / OWN * TILE + half * OWN + own % OWN;
            scratch[row * pitch + column] = strip.values[comptime!(from * OWN) + own];
        }
    }
    sync_strip(blocks.products);
}

/// The larger of the values of a row's two units, or their sum; both get it.
#[cube]
pub(crate) fn over_row(
    value: f32,
    exchange: &mut Shared<[f32]>,
    #[comptime] sum: bool,
    #[comptime] products: Products,
) -> f32 {
    let other = if comptime!(products == Products::Units) {
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
