//! The CPU implementation. It computes blocks of the result in parallel. The `gemm` crate computes each block on one
//! thread.
//!
//! Blocks depend only on the sizes. Therefore neither their results nor their order depend on the number of threads. An
//! expert with many rows is split into several blocks.

use burn::backend::flex::FlexTensor;
use burn::tensor::DType;

use super::backward::{ProductOp, WeightGradientOp};
use super::groups;
use crate::cpu::{Real, for_each_task, own, slice, slice_mut, tensor};
use crate::gemm::Matrix;
use crate::gemm::cpu::{multiply_alone, of_singles, singles};

/// The number of rows per block. With this number, reading a weight takes a small part of the time of a block.
const BLOCK_ROWS: usize = 256;

/// Multiplies the rows `[rows, in]` of each expert by its weights `[experts, in, out]`.
pub(super) fn product(op: &ProductOp, mut inputs: Vec<FlexTensor>) -> FlexTensor {
    let (weights, x) = (inputs.remove(1), inputs.remove(0).to_contiguous());
    let (weights, transposed) = stored(weights);
    let shape = weights.layout().shape().clone();
    let weight = Matrix::contiguous(shape[1], shape[2]);
    let weight = if transposed {
        weight.transpose()
    } else {
        weight
    };
    let shape = [x.layout().shape()[0], weight.columns];
    match x.dtype() {
        DType::F64 => {
            let values = multiply::<f64>(op, slice(&x), slice(&weights), weight);
            tensor(values, shape)
        }
        dtype => {
            let values = multiply(op, &singles(&x), &singles(&weights), weight);
            of_singles(values, dtype, shape)
        }
    }
}

/// Returns the weights as they are stored in memory, and whether their last two dimensions are exchanged in memory.
fn stored(weights: FlexTensor) -> (FlexTensor, bool) {
    if weights.is_contiguous() {
        return (weights, false);
    }
    let exchanged = weights.transpose(1, 2);
    if exchanged.is_contiguous() {
        (exchanged, true)
    } else {
        (weights.to_contiguous(), false)
    }
}

fn multiply<W: Real>(op: &ProductOp, x: &[W], weights: &[W], weight: Matrix) -> Vec<W> {
    let (depth, columns) = (weight.rows, weight.columns);
    let rows = op.group_sizes.iter().sum::<usize>();
    let mut result = vec![W::ZERO; rows * columns];
    if result.is_empty() || depth == 0 {
        return result;
    }
    let mut tasks = vec![];
    let mut rest = result.as_mut_slice();
    for (expert, first, size) in groups(&op.group_sizes) {
        let (group, others) = rest.split_at_mut(size * columns);
        rest = others;
        let blocks = group.chunks_mut(BLOCK_ROWS * columns).enumerate();
        tasks.extend(blocks.map(|(i, block)| (expert, first + i * BLOCK_ROWS, block)));
    }
    for_each_task(tasks, |(expert, first, block)| {
        let left = Matrix::contiguous(block.len() / columns, depth);
        let right = &weights[expert * depth * columns..];
        multiply_alone((&x[first * depth..], left), (right, weight), block, false);
    });
    result
}

/// Computes the gradient of the weights in the flat buffer.
pub(super) fn weight_gradient(op: &WeightGradientOp, mut inputs: Vec<FlexTensor>) -> FlexTensor {
    let flat = inputs.remove(2);
    let [x, gradient] = [&inputs[0], &inputs[1]];
    let sizes = [x, gradient].map(|factor| factor.layout().shape()[1]);
    match x.dtype() {
        DType::F64 => into_flat::<f64>(op, slice(x), slice(gradient), sizes, flat),
        _ => into_flat(op, &singles(x), &singles(gradient), sizes, flat),
    }
}

fn into_flat<W: Real>(
    op: &WeightGradientOp,
    x: &[W],
    gradient: &[W],
    [inputs, outputs]: [usize; 2],
    flat: FlexTensor,
) -> FlexTensor {
    let mut flat = own::<W>(flat);
    let length = op.group_sizes.len() * inputs * outputs;
    let stretch = &mut slice_mut::<W>(&mut flat)[op.offset..op.offset + length];
    let mut tasks = vec![];
    let experts = stretch.chunks_exact_mut(inputs * outputs);
    for ((_, first, size), weight) in groups(&op.group_sizes).zip(experts) {
        let blocks = weight.chunks_mut(BLOCK_ROWS * outputs).enumerate();
        tasks.extend(blocks.map(|(i, block)| (first, size, i * BLOCK_ROWS, block)));
    }
    for_each_task(tasks, |(first, size, column, block)| {
        if size == 0 {
            if !op.add {
                block.fill(W::ZERO);
            }
            return;
        }
        let left = Matrix {
            rows: block.len() / outputs,
            columns: size,
            leading: inputs,
            transposed: true,
        };
        let right = Matrix::contiguous(size, outputs);
        let left = (&x[first * inputs + column..], left);
        multiply_alone(left, (&gradient[first * outputs..], right), block, op.add);
    });
    flat
}
