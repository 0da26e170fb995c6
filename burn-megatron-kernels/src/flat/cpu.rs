//! The CPU implementation. It makes one pass over the range, in tasks of a fixed number of elements.

use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, bf16, f16};

use crate::cpu::{Element, ROW_GRAIN, for_each_task, for_float, own, slice, slice_mut, vectorized};

/// Computes [`accumulate`](super::accumulate). Both tensors must be contiguous.
pub(crate) fn accumulate(
    flat: FlexTensor,
    offset: usize,
    values: &FlexTensor,
    add: bool,
) -> FlexTensor {
    match (flat.dtype(), values.dtype()) {
        (DType::F32, DType::F16) => write::<f32, f16>(flat, offset, slice(values), add),
        (DType::F32, DType::BF16) => write::<f32, bf16>(flat, offset, slice(values), add),
        (DType::F16, DType::F32) => write::<f16, f32>(flat, offset, slice(values), add),
        (DType::BF16, DType::F32) => write::<bf16, f32>(flat, offset, slice(values), add),
        (dtype, _) => for_float!(dtype, E => write::<E, E>(flat, offset, slice(values), add)),
    }
}

fn write<F, V>(flat: FlexTensor, offset: usize, values: &[V], add: bool) -> FlexTensor
where
    F: Element,
    V: Element<Wide = F::Wide>,
{
    let mut flat = own::<F>(flat);
    let stretch = &mut slice_mut::<F>(&mut flat)[offset..offset + values.len()];
    let parts = stretch.chunks_mut(ROW_GRAIN);
    for_each_task(parts.zip(values.chunks(ROW_GRAIN)), |(stretch, values)| {
        part(stretch, values, add)
    });
    flat
}

fn part<F, V>(stretch: &mut [F], values: &[V], add: bool)
where
    F: Element,
    V: Element<Wide = F::Wide>,
{
    vectorized(
        #[inline(always)]
        || {
            let pairs = stretch.iter_mut().zip(values);
            if add {
                pairs.for_each(|(to, value)| *to = F::narrow(to.wide() + value.wide()))
            } else {
                pairs.for_each(|(to, value)| *to = F::narrow(value.wide()))
            }
        },
    );
}
