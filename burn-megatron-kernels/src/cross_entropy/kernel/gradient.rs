//! The gradient of the logits: each is read once and written once.

use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::super::ignored;
use super::super::pieces::{Vocabulary, Weights};
use super::{FAULT, IGNORED, LOADS, token_of, vector};
use crate::cube::{RowPlan, grid};

/// What the gradient of a row needs: `softmax * exp(x - lse) - share`, and `- keep` at the target.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Scales {
    /// `1 - s`.
    pub keep: f32,
    /// `s / K`.
    pub share: f32,
    /// `2 z`.
    pub twice_z: f32,
    /// Not a number: WGSL has no such constant.
    pub nan: f32,
}

/// The vocabulary of a launch; see [`Vocabulary`].
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Columns {
    /// The columns of a row, padding included.
    pub width: u32,
    /// The token that column 0 is.
    pub first: u32,
    /// The columns that are tokens.
    pub real: u32,
    /// The tokens of the whole vocabulary.
    pub tokens: u32,
}

/// One row, with the gradient of its loss multiplied in.
#[derive(CubeType)]
struct Row {
    token: u32,
    lse: f32,
    softmax: f32,
    share: f32,
    keep: f32,
}

#[cube]
impl Row {
    fn new<I: Int>(
        row: usize,
        targets: &Tensor<I>,
        lse: &Tensor<f32>,
        gradient: &Tensor<f32>,
        tokens: u32,
        scales: &Scales,
        #[comptime] ignore: Option<i64>,
    ) -> Row {
        let token = token_of::<I>(targets[row], tokens, ignore);
        let lse = lse[row];
        let mut gradient = gradient[row];
        if token == FAULT {
            gradient = scales.nan;
        }
        Row {
            token,
            lse,
            softmax: gradient * (1.0 + scales.twice_z * lse),
            share: gradient * scales.share,
            keep: gradient * scales.keep,
        }
    }

    /// The gradient of one logit.
    fn at(&self, x: f32, column: u32, columns: &Columns) -> f32 {
        let mut value = 0.0f32;
        if column < columns.real && self.token != IGNORED {
            value = self.softmax * (x - self.lse).exp() - self.share;
            if column + columns.first == self.token {
                value -= self.keep;
            }
        }
        value
    }
}

/// One cube per row; it writes the vectors that begin in the row. `output` may be `logits`.
#[cube(launch_unchecked)]
pub(super) fn gradient_kernel<F: Float, I: Int, N: Size>(
    logits: &Tensor<Vector<F, N>>,
    targets: &Tensor<I>,
    lse: &Tensor<f32>,
    gradient: &Tensor<f32>,
    output: &mut Tensor<Vector<F, N>>,
    rows: u32,
    columns: Columns,
    scales: Scales,
    #[comptime] ignore: Option<i64>,
    #[comptime] units: u32,
    #[define(F, I)] _types: [ElemType; 2],
) {
    let row = CUBE_POS;
    if row < rows as usize {
        let lanes = N::value();
        let width = columns.width as usize;
        let start = row * width;
        let end = start + width;
        let head = start / lanes + (start % lanes != 0) as usize;
        let count = end / lanes + (end % lanes != 0) as usize - head;
        let tokens = columns.tokens;
        let own = Row::new::<I>(row, targets, lse, gradient, tokens, &scales, ignore);
        let step = units as usize;

        let mut i = UNIT_POS as usize;
        while i < count {
            let mut values = Array::<Vector<f32, N>>::new(LOADS);
            #[unroll]
            for k in 0..LOADS {
                if i + k * step < count {
                    values[k] = Vector::cast_from(logits[head + i + k * step]);
                }
            }
            #[unroll]
            for k in 0..LOADS {
                if i + k * step < count {
                    let at = head + i + k * step;
                    let column = at * lanes - start;
                    let stop = column + lanes;
                    let mut result = Vector::<f32, N>::new(0.0);
                    let ignored = own.token == IGNORED;
                    let token = own.token - columns.first;
                    let held = token as usize >= column && (token as usize) < stop;
                    if stop <= columns.real as usize && !ignored && !held {
                        let softmax = (values[k] - Vector::new(own.lse)).exp();
                        result = Vector::new(own.softmax) * softmax - Vector::new(own.share);
                    } else if stop > width {
                        // The last lanes belong to the rows below.
                        #[unroll]
                        for lane in 0..lanes {
                            let below = (column + lane) / width;
                            let other = Row::new::<I>(
                                row + below,
                                targets,
                                lse,
                                gradient,
                                tokens,
                                &scales,
                                ignore,
                            );
                            let column = (column + lane) % width;
                            let value = other.at(values[k].extract(lane), column as u32, &columns);
                            result.insert(lane, value);
                        }
                    } else if column < columns.real as usize && !ignored {
                        #[unroll]
                        for lane in 0..lanes {
                            let column = (column + lane) as u32;
                            let value = own.at(values[k].extract(lane), column, &columns);
                            result.insert(lane, value);
                        }
                    }
                    output[at] = Vector::cast_from(result);
                }
            }
            i += comptime!(LOADS * units as usize);
        }
    }
}

/// Logits, targets, log-sum-exp and gradient of the loss to the gradient of the logits.
pub(in crate::cross_entropy) fn gradient(
    inputs: Vec<CubeTensor>,
    vocabulary: &Vocabulary,
    weights: &Weights,
) -> Vec<CubeTensor> {
    let Ok([logits, targets, lse, gradient]) = <[CubeTensor; 4]>::try_from(inputs) else {
        unreachable!("`Gradient` is launched with four inputs")
    };
    let shape = logits.meta.shape().clone();
    let [rows, width] = [shape[0], shape[1]];
    if rows == 0 {
        return vec![logits];
    }
    let client = logits.client.clone();
    let types = [logits.dtype, targets.dtype];
    let plan = RowPlan::new(&client, logits.dtype, width);
    let vector = vector(&client, &logits);
    // Asked before anything here holds the memory a second time.
    let (output, argument) = match logits.can_mut() {
        true => (logits.clone(), logits.as_tensor_alias(0)),
        false => {
            let output = crate::cube::empty(&logits, shape, logits.dtype);
            (output.clone(), output.into_tensor_arg())
        }
    };
    unsafe {
        gradient_kernel::launch_unchecked(
            &client,
            grid(&client, rows),
            plan.cube_dim(),
            vector,
            logits.into_tensor_arg(),
            targets.into_tensor_arg(),
            lse.into_tensor_arg(),
            gradient.into_tensor_arg(),
            argument,
            rows as u32,
            ColumnsLaunch::new(
                width as u32,
                vocabulary.first,
                vocabulary.real,
                vocabulary.tokens,
            ),
            ScalesLaunch::new(
                weights.keep as f32,
                weights.share as f32,
                2.0 * weights.z as f32,
                f32::NAN,
            ),
            ignored(vocabulary.ignore, types[1]),
            plan.units,
            types.map(dtype_to_storage_type),
        );
    }
    vec![output]
}
