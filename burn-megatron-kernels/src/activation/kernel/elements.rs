//! The element-wise kernels: the forward kernel, and the backward kernel that computes only the gradient of the input.

use cubecl::prelude::*;

use super::formula::{ActivationVariant, gradients, output};
use crate::cube::Split;

/// Loads one vector of the input and adds its bias.
#[cube]
fn load<F: Float, N: Size>(
    x: &Tensor<Vector<F, N>>,
    bias: &ComptimeOption<OwnedTensor<Vector<F, N>>>,
    at: usize,
    column: usize,
) -> Vector<f32, N> {
    let value = Vector::<f32, N>::cast_from(x[at]);
    #[comptime]
    match bias {
        ComptimeOption::Some(bias) => value + Vector::<f32, N>::cast_from(bias.as_slice()[column]),
        ComptimeOption::None => value,
    }
}

/// Returns the weight of a row, or 1 if there is no row weight.
#[cube]
pub(super) fn row_weight(weight: &ComptimeOption<OwnedTensor<f32>>, row: usize) -> f32 {
    #[comptime]
    match weight {
        ComptimeOption::Some(weight) => weight.as_slice()[row],
        ComptimeOption::None => f32::new(1.0),
    }
}

/// Returns the halves `a` and `b` of the input for one vector of the output. For an activation without a gate, both are
/// `a`.
#[cube]
pub(super) fn halves<F: Float, N: Size>(
    x: &Tensor<Vector<F, N>>,
    bias: &ComptimeOption<OwnedTensor<Vector<F, N>>>,
    row: usize,
    column: usize,
    #[comptime] columns: usize,
    #[comptime] variant: ActivationVariant,
) -> (Vector<f32, N>, Vector<f32, N>) {
    let at = row * comptime!(columns * variant.halves()) + column;
    let a = load::<F, N>(x, bias, at, column);
    if comptime!(variant.gated) {
        (a, load::<F, N>(x, bias, at + columns, column + columns))
    } else {
        (a, a)
    }
}

/// Computes the output of the activation.
///
/// `columns` is the number of vectors per output row, and `vectors` is the number of vectors in the complete output. A
/// portion of the work split is one vector. A unit loads all its vectors before it stores the first vector.
#[cube(launch_unchecked)]
pub(super) fn forward_kernel<F: Float, N: Size>(
    x: &Tensor<Vector<F, N>>,
    bias: &ComptimeOption<OwnedTensor<Vector<F, N>>>,
    weight: &ComptimeOption<OwnedTensor<f32>>,
    y: &mut Tensor<Vector<F, N>>,
    clamp: f32,
    offset: f32,
    vectors: u32,
    #[comptime] columns: usize,
    #[comptime] variant: ActivationVariant,
    #[comptime] split: Split,
    #[define(F)] _dtype: ElemType,
) {
    let first = CUBE_POS * comptime!(split.portions()) + UNIT_POS as usize;
    #[unroll]
    for i in 0..split.each {
        let at = first + i * comptime!(split.units as usize);
        if at < vectors as usize {
            let row = at / columns;
            let column = at % columns;
            let (a, b) = halves::<F, N>(x, bias, row, column, columns, variant);
            let value = output::<N>(a, b, clamp, offset, variant);
            y[at] = Vector::cast_from(value * Vector::new(row_weight(weight, row)));
        }
    }
}

/// Computes the gradient `dx`, which has the shape of `x`. See [`forward_kernel`] for the arguments.
#[cube(launch_unchecked)]
pub(super) fn backward_kernel<F: Float, N: Size>(
    x: &Tensor<Vector<F, N>>,
    bias: &ComptimeOption<OwnedTensor<Vector<F, N>>>,
    weight: &ComptimeOption<OwnedTensor<f32>>,
    gradient: &Tensor<Vector<F, N>>,
    dx: &mut Tensor<Vector<F, N>>,
    clamp: f32,
    offset: f32,
    vectors: u32,
    #[comptime] columns: usize,
    #[comptime] variant: ActivationVariant,
    #[comptime] split: Split,
    #[define(F)] _dtype: ElemType,
) {
    let first = CUBE_POS * comptime!(split.portions()) + UNIT_POS as usize;
    #[unroll]
    for i in 0..split.each {
        let at = first + i * comptime!(split.units as usize);
        if at < vectors as usize {
            let row = at / columns;
            let column = at % columns;
            let g = Vector::<f32, N>::cast_from(gradient[at]);
            let scale = row_weight(weight, row);
            let (a, b) = halves::<F, N>(x, bias, row, column, columns, variant);
            let (da, db, _) = gradients::<N>(a, b, g, scale, clamp, offset, variant);
            let to = row * comptime!(columns * variant.halves()) + column;
            dx[to] = Vector::cast_from(da);
            if comptime!(variant.gated) {
                dx[to + columns] = Vector::cast_from(db);
            }
        }
    }
}
