//! The kernel of the forward pass.

use cubecl::prelude::*;

use super::layout::{RowLayout, row_sum};
use crate::cube::lane_sum;

/// The compile-time parameters of the forward kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in super::super) struct NormVariant {
    /// Whether the mean is subtracted.
    pub centred: bool,
    /// Whether the factor is the weight plus one.
    pub zero_centered: bool,
    /// Whether a residual is added to `x` first.
    pub add: bool,
    /// Whether the norm has a bias.
    pub bias: bool,
    /// Whether `x` has a bias, which is added to `x` first.
    pub x_bias: bool,
}

/// Returns a vector of factors: the weight, or the weight plus one.
#[cube]
pub(super) fn factor<W: Float, N: Size>(
    weight: &Tensor<Vector<W, N>>,
    column: usize,
    #[comptime] zero_centered: bool,
) -> Vector<f32, N> {
    let mut factor = Vector::<f32, N>::cast_from(weight[column]);
    if comptime!(zero_centered) {
        factor += Vector::new(1.0);
    }
    factor
}

/// Loads a vector of the row from registers, or from memory a second time.
#[cube]
fn reload<S: Float, N: Size>(
    kept: &Array<Vector<S, N>>,
    source: &mut Tensor<Vector<S, N>>,
    step: usize,
    at: usize,
    #[comptime] in_registers: bool,
) -> Vector<f32, N> {
    if comptime!(in_registers) {
        Vector::<f32, N>::cast_from(kept[step])
    } else {
        Vector::<f32, N>::cast_from(source[at])
    }
}

/// Loads a vector of the row for the first time. With a residual, the function computes and writes the sum. Otherwise
/// it reads the input.
#[cube]
fn first<X: Float, S: Float, B: Float, N: Size>(
    x: &Tensor<Vector<X, N>>,
    x_bias: &Tensor<Vector<B, N>>,
    residual: &Tensor<Vector<S, N>>,
    source: &mut Tensor<Vector<S, N>>,
    at: usize,
    column: usize,
    #[comptime] variant: NormVariant,
) -> Vector<S, N> {
    if comptime!(variant.add) {
        let mut total = Vector::<f32, N>::cast_from(x[at]);
        if comptime!(variant.x_bias) {
            total += Vector::<f32, N>::cast_from(x_bias[column]);
        }
        total += Vector::<f32, N>::cast_from(residual[at]);
        let sum = Vector::<S, N>::cast_from(total);
        source[at] = sum;
        sum
    } else {
        source[at]
    }
}

/// Normalizes the rows of `source`. If there is a residual, the kernel first writes `(x + x_bias) + residual` to
/// `source`.
///
/// The statistics of a row are the reciprocal of its standard deviation, and with `centred` its mean in two parts. The
/// second part of the mean is the mean of the differences from the first part. It corrects the mean and the variance
/// for the rounding of the first part.
///
/// Without a residual, `source` is only read, and `x` and `residual` are not accessed. Without biases, `bias` and
/// `x_bias` are not accessed.
#[cube(launch_unchecked)]
pub(super) fn norm_forward<X: Float, S: Float, W: Float, B: Float, N: Size>(
    x: &Tensor<Vector<X, N>>,
    residual: &Tensor<Vector<S, N>>,
    weight: &Tensor<Vector<W, N>>,
    bias: &Tensor<Vector<W, N>>,
    x_bias: &Tensor<Vector<B, N>>,
    source: &mut Tensor<Vector<S, N>>,
    y: &mut Tensor<Vector<X, N>>,
    statistics: &mut Tensor<f32>,
    epsilon: f32,
    rows: u32,
    #[comptime] variant: NormVariant,
    #[comptime] layout: RowLayout,
    #[define(X, S, W, B)] _types: [ElemType; 4],
) {
    let lanes = comptime!(layout.lanes);
    let columns = comptime!(layout.columns);
    let in_registers = comptime!(layout.in_registers);
    let steps = comptime!(layout.steps());
    let lane = (UNIT_POS % lanes) as usize;
    let row = CUBE_POS * comptime!(layout.rows()) + (UNIT_POS / lanes) as usize;
    let active = row < rows as usize;
    let base = row * columns;
    let count = f32::cast_from(columns * N::value());

    let mut kept = Array::<Vector<S, N>>::new(comptime!(layout.kept()));
    let mut sum = Vector::<f32, N>::new(0.0);
    #[unroll(in_registers)]
    for step in 0..steps {
        let column = lane + step * lanes as usize;
        if active && column < columns {
            let at = base + column;
            let raw = first(x, x_bias, residual, source, at, column, variant);
            if comptime!(in_registers) {
                kept[step] = raw;
            }
            let value = Vector::<f32, N>::cast_from(raw);
            if comptime!(variant.centred) {
                sum += value;
            } else {
                sum += value * value;
            }
        }
    }
    let total = row_sum(lane_sum(sum), layout);

    let mut mean = 0.0f32;
    let mut rest = 0.0f32;
    let mut square = total / count;
    if comptime!(variant.centred) {
        mean = total / count;
        let near = Vector::<f32, N>::new(mean);
        let mut left = Vector::<f32, N>::new(0.0);
        let mut squares = Vector::<f32, N>::new(0.0);
        #[unroll(in_registers)]
        for step in 0..steps {
            let column = lane + step * lanes as usize;
            if active && column < columns {
                let value = reload(&kept, source, step, base + column, in_registers) - near;
                left += value;
                squares += value * value;
            }
        }
        rest = row_sum(lane_sum(left), layout) / count;
        square = row_sum(lane_sum(squares), layout) / count - rest * rest;
        square = max(square, 0.0);
    }
    let rstd = (square + epsilon).inverse_sqrt();
    if active && lane == 0 {
        if comptime!(variant.centred) {
            statistics[row * 3] = rstd;
            statistics[row * 3 + 1] = mean;
            statistics[row * 3 + 2] = rest;
        } else {
            statistics[row] = rstd;
        }
    }

    let rstd = Vector::<f32, N>::new(rstd);
    let mean = Vector::<f32, N>::new(mean);
    let rest = Vector::<f32, N>::new(rest);
    #[unroll(in_registers)]
    for step in 0..steps {
        let column = lane + step * lanes as usize;
        if active && column < columns {
            let mut value = reload(&kept, source, step, base + column, in_registers);
            if comptime!(variant.centred) {
                value = value - mean - rest;
            }
            value = value * rstd * factor(weight, column, variant.zero_centered);
            if comptime!(variant.bias) {
                value += Vector::<f32, N>::cast_from(bias[column]);
            }
            y[base + column] = Vector::cast_from(value);
        }
    }
}
