//! On Burn's CPU backend: rows in parallel.

use burn::backend::flex::FlexTensor;
use rayon::prelude::*;

use super::GatherOp;
use crate::cpu::{Element, ROW_GRAIN, Real, rows_per_task, slice, tensor, vectorized};

pub(super) fn gather<E: Element>(op: &GatherOp, inputs: &[FlexTensor]) -> FlexTensor {
    let sizes = op.sizes;
    let x = slice::<E>(&inputs[0]);
    let index: &[i32] = inputs[1].as_slice().unwrap_or_default();
    let mut output = vec![E::narrow(E::Wide::ZERO); sizes.rows * sizes.width];
    let row_of = |index: &i32| {
        let row = usize::try_from(*index).ok()? / sizes.divisor;
        Some(&x[row * sizes.width..(row + 1) * sizes.width])
    };
    let task = |first: usize, output: &mut [E]| {
        vectorized(
            #[inline(always)]
            || {
                let mut sum = vec![E::Wide::ZERO; sizes.width];
                let index = &index[first * sizes.terms..];
                let rows = output.chunks_exact_mut(sizes.width);
                for (output, index) in rows.zip(index.chunks_exact(sizes.terms)) {
                    let mut rows = index.iter().filter_map(row_of);
                    match (rows.next(), rows.next()) {
                        (None, _) => {}
                        (Some(row), None) => output.copy_from_slice(row),
                        (Some(first), Some(second)) => {
                            for (sum, (a, b)) in sum.iter_mut().zip(first.iter().zip(second)) {
                                *sum = a.wide() + b.wide();
                            }
                            for row in rows {
                                for (sum, x) in sum.iter_mut().zip(row) {
                                    *sum += x.wide();
                                }
                            }
                            for (output, sum) in output.iter_mut().zip(&sum) {
                                *output = E::narrow(*sum);
                            }
                        }
                    }
                }
            },
        )
    };
    if output.is_empty() || sizes.terms == 0 {
        return tensor(output, op.shape.clone());
    }
    let read = output.len() * sizes.terms;
    if read <= ROW_GRAIN {
        task(0, &mut output);
    } else {
        let rows = rows_per_task(sizes.width * sizes.terms);
        let tasks = output.par_chunks_mut(rows * sizes.width).enumerate();
        tasks.for_each(|(i, output)| task(i * rows, output));
    }
    tensor(output, op.shape.clone())
}
