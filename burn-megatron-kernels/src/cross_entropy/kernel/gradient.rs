//! The kernel for the gradient of the logits. It reads the logits once and writes the gradient once.

use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::super::ops::{LossOp, LossWeights, Vocabulary};
use super::{IGNORED_TARGET, INVALID_TARGET, LOADS_PER_STEP, LossLaunch, token_of};
use crate::cube::{launch, output_over};

/// The scalars of the gradient of a row: `softmax * exp(x - lse) - share`, minus `keep` at the target.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct GradientScales {
    /// `1 - s`.
    pub keep: f32,
    /// `s / K`.
    pub share: f32,
    /// `2 z`.
    pub twice_z: f32,
    /// NaN. It is an argument, because WGSL has no constant for it.
    pub nan: f32,
}

/// The vocabulary of a launch as kernel arguments. See [`Vocabulary`].
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct VocabularyColumns {
    /// The number of columns of a row, including padding.
    pub width: u32,
    /// The index of column 0 in the complete vocabulary.
    pub first: u32,
    /// The number of columns that are tokens.
    pub valid: u32,
    /// The number of tokens of the complete vocabulary.
    pub tokens: u32,
}

impl VocabularyColumns {
    pub fn launch(width: usize, vocabulary: &Vocabulary) -> VocabularyColumnsLaunch {
        VocabularyColumnsLaunch::new(
            width as u32,
            vocabulary.first,
            vocabulary.valid,
            vocabulary.tokens,
        )
    }
}

impl GradientScales {
    pub fn launch(weights: &LossWeights) -> GradientScalesLaunch {
        GradientScalesLaunch::new(
            weights.keep as f32,
            weights.share as f32,
            2.0 * weights.z as f32,
            f32::NAN,
        )
    }
}

/// The scalars of one row, multiplied by the gradient of its loss.
#[derive(CubeType)]
pub(super) struct RowGradient {
    token: u32,
    lse: f32,
    softmax: f32,
    share: f32,
    keep: f32,
}

#[cube]
impl RowGradient {
    fn new<I: Int>(
        row: usize,
        targets: &Tensor<I>,
        lse: &Tensor<f32>,
        gradient: &Tensor<f32>,
        tokens: u32,
        scales: &GradientScales,
        #[comptime] ignore: Option<i64>,
    ) -> RowGradient {
        let token = token_of::<I>(targets[row], tokens, ignore);
        RowGradient::of(token, lse[row], gradient[row], scales)
    }

    /// Creates the scalars from the gradient of the row's loss.
    pub fn of(token: u32, lse: f32, gradient: f32, scales: &GradientScales) -> RowGradient {
        let mut gradient = gradient;
        if token == INVALID_TARGET {
            gradient = scales.nan;
        }
        RowGradient {
            token,
            lse,
            softmax: gradient * (1.0 + scales.twice_z * lse),
            share: gradient * scales.share,
            keep: gradient * scales.keep,
        }
    }

    /// Returns the gradient of a vector of logits that starts at `column`. The vector must lie completely in the row.
    pub fn vector<N: Size>(
        &self,
        values: Vector<f32, N>,
        column: usize,
        columns: &VocabularyColumns,
    ) -> Vector<f32, N> {
        let lanes = N::value();
        let stop = column + lanes;
        let mut result = Vector::<f32, N>::new(0.0);
        let ignored = self.token == IGNORED_TARGET;
        let token = self.token - columns.first;
        let held = token as usize >= column && (token as usize) < stop;
        if stop <= columns.valid as usize && !ignored && !held {
            let softmax = (values - Vector::new(self.lse)).exp();
            result = Vector::new(self.softmax) * softmax - Vector::new(self.share);
        } else if column < columns.valid as usize && !ignored {
            #[unroll]
            for lane in 0..lanes {
                let column = (column + lane) as u32;
                let value = self.at(values.extract(lane), column, columns);
                result.insert(lane, value);
            }
        }
        result
    }

    /// Returns the gradient of one logit.
    fn at(&self, x: f32, column: u32, columns: &VocabularyColumns) -> f32 {
        let mut value = 0.0f32;
        if column < columns.valid && self.token != IGNORED_TARGET {
            value = self.softmax * (x - self.lse).exp() - self.share;
            if column + columns.first == self.token {
                value -= self.keep;
            }
        }
        value
    }
}

/// Loads the [`LOADS_PER_STEP`] vectors that a unit processes at a time. The row has `count` vectors, which begin at
/// vector `head`. The loaded vectors start at vector `i` of the row.
#[cube]
pub(super) fn load_step<F: Float, N: Size>(
    logits: &Tensor<Vector<F, N>>,
    head: usize,
    i: usize,
    count: usize,
    #[comptime] units: u32,
) -> Array<Vector<f32, N>> {
    let step = units as usize;
    let mut values = Array::<Vector<f32, N>>::new(LOADS_PER_STEP);
    #[unroll]
    for k in 0..LOADS_PER_STEP {
        if i + k * step < count {
            values[k] = Vector::cast_from(logits[head + i + k * step]);
        }
    }
    values
}

/// Computes the gradient with one cube per row. The cube writes the vectors that begin in the row. `output` may be
/// `logits`.
#[cube(launch_unchecked)]
pub(super) fn gradient_kernel<F: Float, I: Int, N: Size>(
    logits: &Tensor<Vector<F, N>>,
    targets: &Tensor<I>,
    lse: &Tensor<f32>,
    gradient: &Tensor<f32>,
    output: &mut Tensor<Vector<F, N>>,
    rows: u32,
    columns: VocabularyColumns,
    scales: GradientScales,
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
        let own = RowGradient::new::<I>(row, targets, lse, gradient, tokens, &scales, ignore);
        let step = units as usize;

        let mut i = UNIT_POS as usize;
        while i < count {
            let values = load_step(logits, head, i, count, units);
            #[unroll]
            for k in 0..LOADS_PER_STEP {
                if i + k * step < count {
                    let at = head + i + k * step;
                    let column = at * lanes - start;
                    let stop = column + lanes;
                    let mut result = Vector::<f32, N>::new(0.0);
                    if stop <= width {
                        result = own.vector::<N>(values[k], column, &columns);
                    } else {
                        // The last lanes of the vector belong to the following rows.
                        #[unroll]
                        for lane in 0..lanes {
                            let below = row + (column + lane) / width;
                            let other = RowGradient::new::<I>(
                                below, targets, lse, gradient, tokens, &scales, ignore,
                            );
                            let column = (column + lane) % width;
                            let value = other.at(values[k].extract(lane), column as u32, &columns);
                            result.insert(lane, value);
                        }
                    }
                    output[at] = Vector::cast_from(result);
                }
            }
            i += comptime!(LOADS_PER_STEP * units as usize);
        }
    }
}

/// Computes the gradient of the logits from logits, targets, log-sum-exp and gradient of the loss.
pub(in crate::cross_entropy) fn gradient(op: &LossOp, inputs: [CubeTensor; 4]) -> CubeTensor {
    let [logits, targets, lse, gradient] = inputs;
    let launch = LossLaunch::new(op, &logits, &targets);
    if launch.rows == 0 {
        return logits;
    }
    let (output, argument) = output_over(&logits);
    let columns = VocabularyColumns::launch(launch.width, &op.vocabulary);
    unsafe {
        launch!(
            gradient_kernel,
            [launch.client, launch.rows, launch.plan.units],
            [launch.vector],
            [logits, targets, lse, gradient, argument],
            (
                launch.rows as u32,
                columns,
                GradientScales::launch(&op.weights)
            ),
            (launch.ignore, launch.plan.units, launch.types)
        );
    }
    output
}
