//! The CubeCL kernel of the reordering. It writes one word per unit.

use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::{ElemType, FloatKind, UIntKind};
use cubecl::prelude::*;

use super::{ScaleOrder, TILE};
use crate::cube::instance::{AotList, instance};
use crate::cube::{empty, launch};

/// The number of units per cube. Units share no data, so any number that fills a multiprocessor works.
const UNITS: u32 = 256;

/// Returns the source row of the word at `at`.
#[cube]
fn row_of(at: u32, rows: u32, columns: u32, #[comptime] order: ScaleOrder) -> u32 {
    match comptime!(order) {
        ScaleOrder::Transposed => at % rows,
        ScaleOrder::Filled => at / ((columns + 3) / 4 * 4),
        ScaleOrder::Tiled => {
            let within = at % TILE as u32;
            at / TILE as u32 / columns * TILE as u32 + within % 4 * 32 + within / 4
        }
    }
}

/// Returns the source column of the word at `at`.
#[cube]
fn column_of(at: u32, rows: u32, columns: u32, #[comptime] order: ScaleOrder) -> u32 {
    match comptime!(order) {
        ScaleOrder::Transposed => at / rows,
        ScaleOrder::Filled => at % ((columns + 3) / 4 * 4),
        ScaleOrder::Tiled => at / TILE as u32 % columns,
    }
}

/// Reorders one word per unit. `words` is the number of words in the result.
#[cube(launch_unchecked)]
fn arrange_kernel<E: Numeric>(
    scales: &[E],
    arranged: &mut [E],
    rows: u32,
    columns: u32,
    words: u32,
    #[comptime] order: ScaleOrder,
    #[define(E)] _dtype: ElemType,
) {
    let at = (CUBE_POS * UNITS as usize + UNIT_POS as usize) as u32;
    if at < words {
        let row = row_of(at, rows, columns, order);
        let column = column_of(at, rows, columns, order);
        let mut word = E::from_int(0);
        if row < rows && column < columns {
            word = scales[(row * columns + column) as usize];
        }
        arranged[at as usize] = word;
    }
}

/// Reorders scales. See [`library_scales`](super::library_scales).
pub(super) fn arrange(order: ScaleOrder, scales: CubeTensor) -> CubeTensor {
    let shape = scales.shape();
    let sizes = [shape[0], shape[1]];
    let client = scales.client.clone();
    let words = order.len(sizes);
    let arranged = empty(&scales, [words], scales.dtype);
    if words == 0 {
        return arranged;
    }
    let dtype = dtype_to_storage_type(scales.dtype);
    unsafe {
        launch!(
            arrange_kernel,
            [client, words.div_ceil(UNITS as usize), UNITS],
            [],
            [scales, &arranged],
            (sizes[0] as u32, sizes[1] as u32, words as u32),
            (order, dtype)
        );
    }
    arranged
}

/// Adds AOT instances for every order.
pub(crate) fn aot_instances(list: &mut AotList) {
    let float = ElemType::Float(FloatKind::F32);
    let codes = ElemType::UInt(UIntKind::U32);
    for (name, order, dtype) in [
        ("transposed", ScaleOrder::Transposed, float),
        ("filled", ScaleOrder::Filled, float),
        ("tiled", ScaleOrder::Tiled, codes),
    ] {
        instance!(
            list.other("library_scales/{name}"), UNITS,
            arrange_kernel::ArrangeKernel [_ _ _ _ _] (order, dtype)
        );
    }
}
