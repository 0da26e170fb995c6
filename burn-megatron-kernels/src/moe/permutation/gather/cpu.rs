//! The CPU implementation. It processes the rows of the result in parallel.

use burn::backend::flex::FlexTensor;

use super::GatherSizes;
use crate::cpu::{Element, Real, for_row_tasks, slice, tensor, vectorized};

pub(super) fn gather<E: Element>(
    sizes: GatherSizes,
    shape: &[usize],
    inputs: &[FlexTensor],
) -> FlexTensor {
    let x = slice::<E>(&inputs[0]);
    let index: &[i32] = slice(&inputs[1]);
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
    if sizes.terms > 0 {
        for_row_tasks(&mut output, sizes.width, sizes.terms, task);
    }
    tensor(output, shape.to_vec())
}
