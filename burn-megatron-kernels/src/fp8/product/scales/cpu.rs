//! The CPU implementation of the reordering.

use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Element};
use bytemuck::Pod;

use super::{ScaleOrder, TILE};
use crate::cpu::{slice, vector};

/// Reorders scales. See [`library_scales`](super::library_scales).
pub(super) fn arrange(order: ScaleOrder, scales: &FlexTensor) -> FlexTensor {
    match scales.dtype() {
        DType::F32 => arranged::<f32>(order, scales),
        _ => arranged::<u32>(order, scales),
    }
}

fn arranged<E: Element + Pod>(order: ScaleOrder, scales: &FlexTensor) -> FlexTensor {
    let shape = scales.layout().shape();
    let sizes = [shape[0], shape[1]];
    let scales = slice::<E>(scales);
    let words = (0..order.len(sizes)).map(|at| match source(order, sizes, at) {
        Some(from) => scales[from],
        None => E::zeroed(),
    });
    vector(words.collect())
}

/// Returns the source of the element at `at`, or `None` if the element is padding.
fn source(order: ScaleOrder, [rows, columns]: [usize; 2], at: usize) -> Option<usize> {
    let (row, column) = match order {
        ScaleOrder::Transposed => (at % rows, at / rows),
        ScaleOrder::Filled => {
            let width = columns.next_multiple_of(4);
            (at / width, at % width)
        }
        ScaleOrder::Tiled => {
            let (tile, within) = (at / TILE, at % TILE);
            let row = tile / columns * TILE + within % 4 * 32 + within / 4;
            (row, tile % columns)
        }
    };
    (row < rows && column < columns).then(|| row * columns + column)
}
