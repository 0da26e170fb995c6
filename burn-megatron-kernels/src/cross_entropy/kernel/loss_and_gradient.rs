//! Loss and gradient of each row in one launch, which reads a row from memory once and writes it once: the second
//! reading comes from the cache.

use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::super::ignored;
use super::super::ops::{LossWeights, Vocabulary};
use super::combine::{LossScales, log_sum_exp, row_loss};
use super::gradient::{GradientScales, RowGradient, VocabularyColumns};
use super::statistics::row_statistics;
use super::{LOADS_PER_STEP, combine, gradient, statistics, token_of};
use crate::cube::{Reduction, RowPlan, empty, grid};

/// One cube per row, of whole vectors. `output` may be `logits`.
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
            let mut values = Array::<Vector<f32, N>>::new(LOADS_PER_STEP);
            #[unroll]
            for k in 0..LOADS_PER_STEP {
                if i + k * step < count {
                    values[k] = Vector::cast_from(logits[head + i + k * step]);
                }
            }
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

/// Logits, targets and the gradient of the loss to the loss and the gradient of the logits.
pub(in crate::cross_entropy) fn loss_and_gradient(
    inputs: Vec<CubeTensor>,
    vocabulary: &Vocabulary,
    weights: &LossWeights,
) -> Vec<CubeTensor> {
    let Ok([logits, targets, upstream]) = <[CubeTensor; 3]>::try_from(inputs) else {
        unreachable!("`LossAndGradientOp` is launched with three inputs")
    };
    let shape = logits.meta.shape().clone();
    let [rows, width] = [shape[0], shape[1]];
    let client = logits.client.clone();
    let mut vectors = client.io_optimized_vector_sizes(logits.dtype.size());
    let widest = vectors.next().unwrap_or(1);
    if rows == 0 || !width.is_multiple_of(widest) {
        // A vector may lie in two rows, of two cubes.
        let statistics = statistics(vec![logits.clone(), targets.clone()], vocabulary);
        let inputs = statistics.into_iter().chain([targets.clone()]).collect();
        let mut combined = combine(inputs, vocabulary, weights);
        let inputs = vec![logits, targets, combined.remove(1), upstream];
        combined.extend(gradient(inputs, vocabulary, weights));
        return combined;
    }
    let types = [logits.dtype, targets.dtype];
    let plan = RowPlan::new(&client, logits.dtype, width);
    let loss = empty(&upstream, [rows], upstream.dtype);
    // Checked before a second handle shares the memory.
    let (output, argument) = if logits.can_mut() {
        (logits.clone(), logits.as_tensor_alias(0))
    } else {
        let output = empty(&logits, shape, logits.dtype);
        (output.clone(), output.into_tensor_arg())
    };
    unsafe {
        loss_and_gradient_kernel::launch_unchecked(
            &client,
            grid(&client, rows),
            plan.cube_dim(),
            widest,
            logits.into_tensor_arg(),
            targets.into_tensor_arg(),
            upstream.into_tensor_arg(),
            loss.clone().into_tensor_arg(),
            argument,
            rows as u32,
            VocabularyColumns::launch(width, vocabulary),
            LossScales::launch(weights),
            GradientScales::launch(weights),
            weights.smoothing != 0.0,
            ignored(vocabulary.ignore, types[1]),
            plan.units,
            plan.reduction == Reduction::Planes,
            types.map(dtype_to_storage_type),
        );
    }
    vec![loss, output]
}
