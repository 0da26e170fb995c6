//! The CPU implementation. Parallel tasks process parts of rows in a buffer that stays in the cache.

use burn::backend::TensorMetadata;
use burn::backend::flex::FlexTensor;

use super::backward::{DropoutBackwardOp, DropoutForwardOp};
use crate::column_sum::cpu::write;
use crate::cpu::{
    self, Element, Real, for_float, map_tasks, rows_per_task, slice, tensor, vectorized,
};

/// The number of elements processed at a time.
const CHUNK: usize = 2048;
/// The number of rows per task for tasks that sum their rows. It keeps the number of partial sums small compared to the
/// number of rows.
const SUMMED_ROWS: usize = 64;

pub(super) fn forward(op: &DropoutForwardOp, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
    let mut rest = inputs[1..].iter();
    let bias = rest.next().filter(|_| op.bias);
    let residual = if op.residual { inputs.last() } else { None };
    let input = &inputs[0];
    let is_wider = residual.is_some_and(|residual| residual.dtype() != input.dtype());
    for_float!(input.dtype(), I => if is_wider {
        vec![forward_as::<I, <I as Element>::Wide>(op, input, bias, residual)]
    } else {
        vec![forward_as::<I, I>(op, input, bias, residual)]
    })
}

/// Converts a bias to the type used for computation.
fn widen<W: Real>(bias: &FlexTensor) -> Vec<W> {
    for_float!(bias.dtype(), B => {
        slice::<B>(bias).iter().map(|value| W::of(value.wide().double())).collect()
    })
}

fn forward_as<I: Element, O: Element<Wide = I::Wide>>(
    op: &DropoutForwardOp,
    x: &FlexTensor,
    bias: Option<&FlexTensor>,
    residual: Option<&FlexTensor>,
) -> FlexTensor {
    let (input, residual) = (slice::<I>(x), residual.map(slice::<O>));
    let bias = bias.map(widen::<I::Wide>);
    let bias = bias.as_deref();
    let mut output = vec![O::narrow(O::Wide::ZERO); op.sizes.elements];
    let width = op.sizes.width;
    let task = rows_per_task(width) * width;
    for_tasks(
        task,
        &mut output,
        #[inline(always)]
        |first, output: &mut [O]| {
            let mut buffer = vec![I::Wide::ZERO; piece(width)];
            for (i, output) in output.chunks_mut(buffer.len()).enumerate() {
                let start = first + i * piece(width);
                let values = &mut buffer[..output.len()];
                load(values, &input[start..start + output.len()], bias, width);
                if let Some(mask) = &op.mask {
                    mask.multiply(start, values);
                }
                match residual {
                    Some(residual) => add(output, values, &residual[start..]),
                    None => cpu::narrow(values, output),
                }
            }
        },
    );
    tensor(output, x.shape())
}

/// Calls `work(first element, values)` for tasks of a fixed size. Returns the results in order.
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

/// Returns the number of elements per part. A part consists of complete rows.
fn piece(width: usize) -> usize {
    (CHUNK / width).max(1) * width
}

#[inline(always)]
fn load<I: Element>(values: &mut [I::Wide], input: &[I], bias: Option<&[I::Wide]>, width: usize) {
    match bias {
        None => cpu::widen(input, values),
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

pub(super) fn backward(op: &DropoutBackwardOp, mut inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
    let target = op.place.map(|place| (inputs.remove(1), vec![place]));
    let gradient = &inputs[0];
    let (result, sum) = for_float!(op.input, I => if gradient.dtype() != op.input {
        backward_as::<I, <I as Element>::Wide>(op, gradient)
    } else {
        backward_as::<I, I>(op, gradient)
    });
    let sum = sum.map(|sum| {
        let dtype = sum.dtype();
        write(vec![sum], dtype, target)
    });
    [vec![result], sum.unwrap_or_default()].concat()
}

/// Returns the gradient of the input, and the sum of its rows if requested.
fn backward_as<I: Element, O: Element<Wide = I::Wide>>(
    op: &DropoutBackwardOp,
    of_output: &FlexTensor,
) -> (FlexTensor, Option<FlexTensor>) {
    let (mask, summed, gradient) = (op.mask, op.bias, slice::<O>(of_output));
    let mut result = vec![I::narrow(I::Wide::ZERO); op.sizes.elements];
    let width = op.sizes.width;
    let rows = if summed {
        rows_per_task(width).max(SUMMED_ROWS)
    } else {
        rows_per_task(width)
    };
    let partial = for_tasks(
        rows * width,
        &mut result,
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
                cpu::narrow(values, result);
                if summed {
                    add_rows(&mut sums, values);
                }
            }
            sums
        },
    );
    let sum = summed.then(|| {
        let mut total = vec![0.0; width];
        for sums in partial {
            for (total, sum) in total.iter_mut().zip(sums) {
                *total += sum.double();
            }
        }
        let total: Vec<_> = total.into_iter().map(I::Wide::of).collect();
        tensor(total, [width])
    });
    (tensor(result, of_output.shape()), sum)
}

#[inline(always)]
fn add_rows<W: Real>(sums: &mut [W], values: &[W]) {
    for row in values.chunks_exact(sums.len()) {
        cpu::add(sums, row);
    }
}
