//! The backward kernel with sums: over rows for the bias, and along a row for the row weight.

use cubecl::prelude::*;

use super::elements::{halves, row_weight};
use super::formula::{ActivationVariant, gradients};
use crate::cube::{cube_sum, lane_sum};

/// The maximum number of units per cube. With twice this number, the CUDA compiler assigns fewer registers than the
/// formulas need, in order to fit more cubes on a multiprocessor.
pub(super) const SUM_UNITS: u32 = 128;

/// The tiling of the work, in vectors of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct SumTiling {
    /// The number of vectors per row.
    pub columns: usize,
    /// The number of vectors that a cube processes per row. If the bias has a gradient, this is the number of units,
    /// and each unit sums its own columns in registers.
    pub tile: usize,
    /// The number of units per cube.
    pub units: u32,
    /// Whether sums over units use plane operations.
    pub planes: bool,
}

/// Computes gradients and partial sums. A cube processes `rows_per_cube` rows of one tile.
///
/// `dbias` is `[blocks of rows, width of x]` and `dweight` is `[rows, tiles]`.
#[cube(launch_unchecked)]
pub(super) fn sums_kernel<F: Float, N: Size>(
    x: &Tensor<Vector<F, N>>,
    bias: &ComptimeOption<OwnedTensor<Vector<F, N>>>,
    weight: &ComptimeOption<OwnedTensor<f32>>,
    gradient: &Tensor<Vector<F, N>>,
    dx: &mut Sequence<OwnedTensor<Vector<F, N>>>,
    dbias: &mut Sequence<OwnedTensor<Vector<f32, N>>>,
    dweight: &mut Sequence<OwnedTensor<f32>>,
    clamp: f32,
    offset: f32,
    rows: u32,
    rows_per_cube: u32,
    #[comptime] tiling: SumTiling,
    #[comptime] variant: ActivationVariant,
    #[define(F)] _dtype: ElemType,
) {
    let tiles = comptime!(tiling.columns.div_ceil(tiling.tile));
    let width = comptime!(tiling.columns * variant.halves());
    let block = CUBE_POS / tiles;
    let tile = CUBE_POS % tiles;
    let first = tile * comptime!(tiling.tile) + UNIT_POS as usize;
    let end = min((tile + 1) * comptime!(tiling.tile), tiling.columns);
    let mut row = block * rows_per_cube as usize;
    let end_row = min(row + rows_per_cube as usize, rows as usize);
    let is_inside = row < rows as usize;
    let mut sum_a = Vector::<f32, N>::new(0.0);
    let mut sum_b = Vector::<f32, N>::new(0.0);
    while row < end_row {
        let mut dot = Vector::<f32, N>::new(0.0);
        let scale = row_weight(weight, row);
        let mut column = first;
        while column < end {
            let g = Vector::<f32, N>::cast_from(gradient[row * comptime!(tiling.columns) + column]);
            let (a, b) = halves::<F, N>(x, bias, row, column, tiling.columns, variant);
            let (da, db, product) = gradients::<N>(a, b, g, scale, clamp, offset, variant);
            if comptime!(dx.len() > 0) {
                let dx = dx.index_mut(0);
                let to = row * width + column;
                dx.as_mut_slice()[to] = Vector::cast_from(da);
                if comptime!(variant.gated) {
                    dx.as_mut_slice()[to + tiling.columns] = Vector::cast_from(db);
                }
            }
            sum_a += da;
            sum_b += db;
            dot += product;
            column += comptime!(tiling.units as usize);
        }
        if comptime!(dweight.len() > 0) {
            let total = cube_sum(lane_sum(dot), tiling.units, tiling.planes);
            if UNIT_POS == 0 {
                let dweight = dweight.index_mut(0);
                dweight.as_mut_slice()[row * tiles + tile] = total;
            }
        }
        row += 1;
    }
    if comptime!(dbias.len() > 0) {
        if is_inside && first < end {
            let dbias = dbias.index_mut(0);
            let at = block * width + first;
            dbias.as_mut_slice()[at] = sum_a;
            if comptime!(variant.gated) {
                dbias.as_mut_slice()[at + tiling.columns] = sum_b;
            }
        }
    }
}
