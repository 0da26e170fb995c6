//! The CPU implementation: pieces of rows in a buffer that stays in the cache, tasks of pieces in
//! parallel.

use burn::backend::TensorMetadata;
use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, bf16, f16};

use super::backward::{DropoutBackwardOp, DropoutForwardOp};
use super::{DropoutMask, RowSizes};
use crate::column_sum::cpu::write;
use crate::cpu::{Element, Real, for_float, map_tasks, rows_per_task, slice, tensor, vectorized};

/// Elements that are worked on at a time.
const CHUNK: usize = 2048;
/// Rows of a task that sums them, so that the sums of the tasks are few beside the rows.
const SUMMED_ROWS: usize = 64;

/// Calls `$work` with the types of the narrower and of the wider side of the operation.
macro_rules! for_pair {
    ($dtypes:expr, $input:ident, $output:ident => $work:expr) => {
        match $dtypes {
            (DType::F16, DType::F32) => {
                type $input = f16;
                type $output = f32;
                $work
            }
            (DType::BF16, DType::F32) => {
                type $input = bf16;
                type $output = f32;
                $work
            }
            (dtype, _) => for_float!(dtype, Same => {
                type $input = Same;
                type $output = Same;
                $work
            }),
        }
    };
}

pub(super) fn forward(kernel: &DropoutForwardOp, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
    let mut rest = inputs[1..].iter();
    let bias = rest.next().filter(|_| kernel.bias);
    let residual = if kernel.residual { inputs.last() } else { None };
    let input = &inputs[0];
    let dtype = residual.unwrap_or(input).dtype();
    for_pair!((input.dtype(), dtype), I, O => {
        let bias = bias.map(widen::<<I as Element>::Wide>);
        let mut output = vec![O::narrow(<O as Element>::Wide::ZERO); kernel.sizes.elements];
        forward_as::<I, O>(
            kernel,
            slice(input),
            bias.as_deref(),
            residual.map(slice),
            &mut output,
        );
        vec![tensor(output, input.shape())]
    })
}

/// A bias in the type that is computed in.
fn widen<W: Real>(bias: &FlexTensor) -> Vec<W> {
    for_float!(bias.dtype(), B => {
        slice::<B>(bias).iter().map(|value| W::of(value.wide().double())).collect()
    })
}

fn forward_as<I: Element, O: Element<Wide = I::Wide>>(
    kernel: &DropoutForwardOp,
    input: &[I],
    bias: Option<&[I::Wide]>,
    residual: Option<&[O]>,
    output: &mut [O],
) {
    let width = kernel.sizes.width;
    let task = rows_per_task(width) * width;
    for_tasks(
        task,
        output,
        #[inline(always)]
        |first, output: &mut [O]| {
            let mut buffer = vec![I::Wide::ZERO; piece(width)];
            for (i, output) in output.chunks_mut(buffer.len()).enumerate() {
                let start = first + i * piece(width);
                let values = &mut buffer[..output.len()];
                load(values, &input[start..start + output.len()], bias, width);
                if let Some(mask) = &kernel.mask {
                    mask.multiply(start, values);
                }
                match residual {
                    Some(residual) => add(output, values, &residual[start..]),
                    None => narrow(output, values),
                }
            }
        },
    );
}

/// Runs `work(first element, its values)` for tasks of a fixed size; returns what they give, in
/// order.
fn for_tasks<E: Element, T: Send>(
    task: usize,
    values: &mut [E],
    work: impl Fn(usize, &mut [E]) -> T + Sync,
) -> Vec<T> {
    map_tasks(values.chunks_mut(task).enumerate(), |(i, values)| {
        vectorized(
            #[inline(always)]
            || work(i * task, values),
        )
    })
}

/// Elements of a piece: whole rows.
fn piece(width: usize) -> usize {
    (CHUNK / width).max(1) * width
}

#[inline(always)]
fn load<I: Element>(values: &mut [I::Wide], input: &[I], bias: Option<&[I::Wide]>, width: usize) {
    match bias {
        None => {
            for (value, x) in values.iter_mut().zip(input) {
                *value = x.wide();
            }
        }
        Some(bias) => {
            let rows = values
                .chunks_exact_mut(width)
                .zip(input.chunks_exact(width));
            for (values, input) in rows {
                for ((value, x), b) in values.iter_mut().zip(input).zip(bias) {
                    *value = x.wide() + *b;
                }
            }
        }
    }
}

#[inline(always)]
fn add<O: Element>(output: &mut [O], values: &[O::Wide], residual: &[O]) {
    for ((y, value), r) in output.iter_mut().zip(values).zip(residual) {
        *y = O::narrow(*value + r.wide());
    }
}

#[inline(always)]
fn narrow<O: Element>(output: &mut [O], values: &[O::Wide]) {
    for (y, value) in output.iter_mut().zip(values) {
        *y = O::narrow(*value);
    }
}

pub(super) fn backward(kernel: &DropoutBackwardOp, mut inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
    let target = kernel.place.map(|place| (inputs.remove(1), vec![place]));
    let gradient = &inputs[0];
    let shape = gradient.shape();
    for_pair!((kernel.input, gradient.dtype()), I, O => {
        let mut result = vec![I::narrow(<I as Element>::Wide::ZERO); kernel.sizes.elements];
        let gradient = slice::<O>(gradient);
        let partial_sums = backward_as::<I, O>(kernel.sizes, kernel.mask, kernel.bias, gradient, &mut result);
        let mut outputs = vec![tensor(result, shape)];
        if let Some(sum) = partial_sums {
            let sum: Vec<_> = sum.into_iter().map(<I as Element>::Wide::of).collect();
            let sum = tensor(sum, [kernel.sizes.width]);
            let dtype = sum.dtype();
            outputs.extend(write(vec![sum], dtype, target));
        }
        outputs
    })
}

/// Fills `result` with the gradient of the input; returns the sum of its rows if requested.
fn backward_as<I: Element, O: Element<Wide = I::Wide>>(
    sizes: RowSizes,
    mask: Option<DropoutMask>,
    summed: bool,
    gradient: &[O],
    result: &mut [I],
) -> Option<Vec<f64>> {
    let width = sizes.width;
    let rows = if summed {
        rows_per_task(width).max(SUMMED_ROWS)
    } else {
        rows_per_task(width)
    };
    let partial = for_tasks(
        rows * width,
        result,
        #[inline(always)]
        |first, result: &mut [I]| {
            let mut buffer = vec![I::Wide::ZERO; piece(width)];
            let mut sums = vec![I::Wide::ZERO; if summed { width } else { 0 }];
            for (i, result) in result.chunks_mut(buffer.len()).enumerate() {
                let start = first + i * piece(width);
                let values = &mut buffer[..result.len()];
                load(values, &gradient[start..start + result.len()], None, width);
                if let Some(mask) = &mask {
                    mask.multiply(start, values);
                }
                narrow(result, values);
                if summed {
                    add_rows(&mut sums, values);
                }
            }
            sums
        },
    );
    summed.then(|| {
        let mut total = vec![0.0; width];
        for sums in partial {
            for (total, sum) in total.iter_mut().zip(sums) {
                *total += sum.double();
            }
        }
        total
    })
}

#[inline(always)]
fn add_rows<W: Real>(sums: &mut [W], values: &[W]) {
    for row in values.chunks_exact(sums.len()) {
        for (sum, value) in sums.iter_mut().zip(row) {
            *sum += *value;
        }
    }
}
