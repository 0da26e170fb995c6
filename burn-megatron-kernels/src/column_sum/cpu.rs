//! The CPU implementation. It sums each column from the first row to the last row, and processes columns in parallel.

use burn::backend::flex::FlexTensor;
use burn::tensor::DType;

use crate::cpu::{Element, ROW_GRAIN, Real, for_each_task, for_float, slice, tensor, vectorized};
use crate::flat;
use crate::gradient::Place;

/// The number of columns per task, a few cache lines of a row.
const TASK_COLUMNS: usize = 128;

/// Returns the sum of the rows of a matrix, in f32 (f64 for f64). With a place, writes the sum to the flat buffer,
/// which is the second input, and returns the buffer.
pub(super) fn column_sum(
    (columns, place): &(usize, Option<Place>),
    mut inputs: Vec<FlexTensor>,
) -> Vec<FlexTensor> {
    let (x, columns) = (inputs.remove(0), *columns);
    let sum = for_float!(x.dtype(), E => tensor(sum::<E>(slice(&x), columns), [columns]));
    let dtype = sum.dtype();
    write(
        vec![sum],
        dtype,
        inputs.pop().zip(place.map(|place| vec![place])),
    )
}

fn sum<E: Element>(x: &[E], columns: usize) -> Vec<E::Wide> {
    let mut sums = vec![E::Wide::ZERO; columns];
    let task = |first: usize, sums: &mut [E::Wide]| {
        vectorized(
            #[inline(always)]
            || {
                for row in x.chunks_exact(columns) {
                    for (sum, x) in sums.iter_mut().zip(&row[first..]) {
                        *sum += x.wide();
                    }
                }
            },
        )
    };
    let part = if x.len() <= ROW_GRAIN {
        columns.max(1)
    } else {
        TASK_COLUMNS
    };
    let parts = sums.chunks_mut(part).enumerate();
    for_each_task(parts, |(i, sums)| task(i * part, sums));
    sums
}

/// Returns the sums as tensors of type `dtype`. If the sums have places in a flat buffer, returns the flat buffer with
/// the sums instead.
pub(crate) fn write(
    sums: Vec<FlexTensor>,
    dtype: DType,
    target: Option<(FlexTensor, Vec<Place>)>,
) -> Vec<FlexTensor> {
    let Some((flat, places)) = target else {
        return sums.iter().map(|sum| narrow(sum, dtype)).collect();
    };
    let write = |flat, (sum, place): (&FlexTensor, &Place)| {
        flat::cpu::accumulate(flat, place.offset, sum, place.add)
    };
    vec![sums.iter().zip(&places).fold(flat, write)]
}

fn narrow(sum: &FlexTensor, dtype: DType) -> FlexTensor {
    if sum.dtype() == dtype {
        return sum.clone();
    }
    for_float!(sum.dtype(), S => for_float!(dtype, W => {
        let narrow = |x: &S| W::narrow(<W as Element>::Wide::of(x.wide().double()));
        tensor::<W>(slice::<S>(sum).iter().map(narrow).collect(), sum.layout().shape().clone())
    }))
}
