//! The CPU implementation. The lookups of an id are added one after the other, and blocks of table rows are processed
//! in parallel.

use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, bf16, f16};

use super::AccumulateRowsOp;
use crate::cpu::{Element, ROW_GRAIN, Real, for_each_task, own, slice, slice_mut, vectorized};
use crate::launch::exactly;

/// The number of rows per task.
const TASK_ROWS: usize = 256;

/// Calls `$body` with the element type of a gradient that is summed in f32.
macro_rules! for_32 {
    ($gradient:ident, $element:ident => $body:expr) => {
        match $gradient.dtype() {
            DType::F16 => {
                type $element = f16;
                $body
            }
            DType::BF16 => {
                type $element = bf16;
                $body
            }
            _ => {
                type $element = f32;
                $body
            }
        }
    };
}

/// Adds the gradient rows. See [`accumulate_rows`](super::accumulate_rows).
pub(super) fn accumulate_rows(op: &AccumulateRowsOp, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
    let [gradient, flat] = exactly(inputs);
    vec![match flat.dtype() {
        DType::F64 => run::<f64, f64>(op, flat, &gradient),
        DType::F16 => for_32!(gradient, G => run::<f16, G>(op, flat, &gradient)),
        DType::BF16 => for_32!(gradient, G => run::<bf16, G>(op, flat, &gradient)),
        _ => for_32!(gradient, G => run::<f32, G>(op, flat, &gradient)),
    }]
}

fn run<F, G>(op: &AccumulateRowsOp, flat: FlexTensor, gradient: &FlexTensor) -> FlexTensor
where
    F: Element,
    G: Element<Wide = F::Wide>,
{
    let mut flat = own::<F>(flat);
    let (lookups, gradient) = (&op.lookups, slice::<G>(gradient));
    let last_row = lookups.id(op.found.end - 1) - op.first_row;
    let end = op.offset + (last_row + 1) * op.width;
    let rows = &mut slice_mut::<F>(&mut flat)[op.offset..end];
    let task = |(number, rows): (usize, &mut [F])| {
        let first = op.first_row + number * TASK_ROWS;
        let found = lookups.within(&(first..first + rows.len() / op.width));
        vectorized(
            #[inline(always)]
            || {
                let mut sum = vec![F::Wide::ZERO; op.width];
                for index in found {
                    sum.fill(F::Wide::ZERO);
                    for lookup in &lookups.all()[lookups.range(index)] {
                        let from = *lookup as usize * op.width;
                        let row = &gradient[from..from + op.width];
                        for (sum, value) in sum.iter_mut().zip(row) {
                            *sum += value.wide();
                        }
                    }
                    let to = (lookups.id(index) - first) * op.width;
                    for (to, sum) in rows[to..to + op.width].iter_mut().zip(&sum) {
                        *to = F::narrow(to.wide() + *sum);
                    }
                }
            },
        )
    };
    let tasks = rows.chunks_mut(TASK_ROWS * op.width).enumerate();
    if gradient.len() <= ROW_GRAIN {
        tasks.for_each(task);
    } else {
        for_each_task(tasks, task);
    }
    flat
}
