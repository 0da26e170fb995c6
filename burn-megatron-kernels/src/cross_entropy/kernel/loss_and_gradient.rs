//! The kernel that computes the loss and the gradient of each row. It reads each row from memory once and writes it
//! once. The second read of a row comes from the cache.

use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::super::ops::LossOp;
use super::combine::{LossScales, log_sum_exp, row_loss};
use super::gradient::{GradientScales, RowGradient, VocabularyColumns, load_step};
use super::statistics::row_statistics;
use super::{LOADS_PER_STEP, LossLaunch, combine, gradient, statistics, token_of};
use crate::cube::{empty, launch, output_over};

/// Computes loss and gradient with one cube per row. Rows must consist of complete vectors.
/// `output` may be `logits`.
#[cube(launch_unchecked)]
pub(super) fn loss_and_gradient_kernel<F: Float, I: Int, N: Size>(
    logits: &Tensor<Vector<F, N>>,
    targets: &Tensor<I>,
    upstream: &Tensor<f32>,
    loss: &mut Tensor<f32>,
    output: &mut Tensor<Vector<F, N>>,
    rows: u32,
    columns: VocabularyColumns,
    weights: LossScales,
    scales: GradientScales,
    #[comptime] smoothed: bool,
    #[comptime] ignore: Option<i64>,
    #[comptime] units: u32,
    #[comptime] planes: bool,
    #[define(F, I)] _types: [ElemType; 2],
) {
    let row = CUBE_POS;
    if row < rows as usize {
        let lanes = N::value();
        let width = columns.width as usize;
        let token = token_of::<I>(targets[row], columns.tokens, ignore);
        let valid = columns.valid;
        let first = columns.first;
        let start = row * width;
        let found = row_statistics::<F, N>(logits, start, token, valid, first, units, planes);
        if UNIT_POS == 0 {
            loss[row] = row_loss(&found, token, &weights, smoothed);
        }

        let own = RowGradient::of(token, log_sum_exp(&found), upstream[row], &scales);
        let head = start / lanes;
        let count = width / lanes;
        let step = units as usize;
        let mut i = UNIT_POS as usize;
        while i < count {
            let values = load_step(logits, head, i, count, units);
            #[unroll]
            for k in 0..LOADS_PER_STEP {
                let at = i + k * step;
                if at < count {
                    let result = own.vector::<N>(values[k], at * lanes, &columns);
                    output[head + at] = Vector::cast_from(result);
                }
            }
            i += comptime!(LOADS_PER_STEP * units as usize);
        }
    }
}

/// Computes the loss and the gradient of the logits from logits, targets and the gradient of the
/// loss.
pub(in crate::cross_entropy) fn loss_and_gradient(
    op: &LossOp,
    [logits, targets, upstream]: [CubeTensor; 3],
) -> [CubeTensor; 2] {
    let launch = LossLaunch::new(op, &logits, &targets);
    let mut vectors = launch.client.io_optimized_vector_sizes(logits.dtype.size());
    let widest = vectors.next().unwrap_or(1);
    if launch.rows == 0 || !launch.width.is_multiple_of(widest) {
        // A vector may contain elements of two rows, which are processed by different cubes.
        let statistics = statistics(op, [logits.clone(), targets.clone()]);
        let [loss, lse] = combine(op, [statistics, targets.clone()]);
        return [loss, gradient(op, [logits, targets, lse, upstream])];
    }
    let loss = empty(&upstream, [launch.rows], upstream.dtype);
    let (output, argument) = output_over(&logits);
    let columns = VocabularyColumns::launch(launch.width, &op.vocabulary);
    let weights = &op.weights;
    unsafe {
        launch!(
            loss_and_gradient_kernel,
            [launch.client, launch.rows, launch.plan.units],
            [widest],
            [logits, targets, upstream, &loss, argument],
            (launch.rows as u32, columns),
            (LossScales::launch(weights), GradientScales::launch(weights)),
            (weights.smoothing != 0.0, launch.ignore),
            (launch.plan.units, launch.plan.planes(), launch.types)
        );
    }
    [loss, output]
}
