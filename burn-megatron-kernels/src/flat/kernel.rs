//! The CubeCL kernels. To write or add values, a unit processes one vector of the buffer. To clear or scale a buffer, a
//! unit processes several vectors.

use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use crate::cube::instance::{AotList, instance, types};
use crate::cube::{RowPlan, launch, own};

/// The number of units per cube. Units share no data, so any number that fills a multiprocessor works.
const UNITS: u32 = 256;

/// Writes or adds one vector per unit. `first` is the index of the vector in the buffer that receives the first vector
/// of the values.
#[cube(launch_unchecked)]
fn accumulate_kernel<F: Float, V: Float, N: Size>(
    flat: &mut [Vector<F, N>],
    values: &[Vector<V, N>],
    first: u32,
    vectors: u32,
    #[comptime] add: bool,
    #[define(F, V)] _dtypes: [ElemType; 2],
) {
    let at = CUBE_POS * UNITS as usize + UNIT_POS as usize;
    if at < vectors as usize {
        let to = first as usize + at;
        let mut sum = Vector::<f32, N>::cast_from(values[at]);
        if comptime!(add) {
            sum += Vector::<f32, N>::cast_from(flat[to]);
        }
        flat[to] = Vector::cast_from(sum);
    }
}

/// Computes [`accumulate`](super::accumulate). Both tensors must be contiguous. The values have any
/// shape and at least one element.
pub(crate) fn accumulate(
    flat: CubeTensor,
    offset: usize,
    values: CubeTensor,
    add: bool,
) -> CubeTensor {
    let flat = own(flat);
    let client = flat.client.clone();
    let count = values.shape().num_elements();
    // A power of two divides the bitwise or of two numbers only if it divides both numbers.
    let vector = RowPlan::new(&client, flat.dtype, offset | count).vector;
    let vectors = count / vector;
    let types = [flat.dtype, values.dtype];
    unsafe {
        launch!(
            accumulate_kernel,
            [client, vectors.div_ceil(UNITS as usize), UNITS],
            [vector],
            [&flat, values],
            ((offset / vector) as u32, vectors as u32),
            (add, types.map(dtype_to_storage_type))
        );
    }
    flat
}

/// Clears one piece per cube. `table` holds the first element and the length of each piece.
#[cube(launch_unchecked)]
fn clear_kernel<F: Float, N: Size>(
    flat: &mut [Vector<F, N>],
    table: &Tensor<u32>,
    pieces: u32,
    #[comptime] lanes: u32,
    #[define(F)] _dtype: ElemType,
) {
    if (CUBE_POS as u32) < pieces {
        let first = table[2 * CUBE_POS] / lanes;
        let count = table[2 * CUBE_POS + 1] / lanes;
        let mut at = UNIT_POS;
        while at < count {
            flat[(first + at) as usize] = Vector::new(F::from_int(0));
            at += UNITS;
        }
    }
}

/// Clears the pieces of a table. Every power of two that divides `bits` also divides all starts and lengths.
pub(super) fn clear(flat: CubeTensor, table: CubeTensor, pieces: usize, bits: usize) -> CubeTensor {
    let flat = own(flat);
    let client = flat.client.clone();
    let vector = RowPlan::new(&client, flat.dtype, bits).vector;
    // SAFETY: the pieces are in the buffer, which the public function checks.
    unsafe {
        launch!(
            clear_kernel,
            [client, pieces, UNITS],
            [vector],
            [&flat, table],
            (pieces as u32, vector as u32),
            (dtype_to_storage_type(flat.dtype))
        );
    }
    flat
}

/// The number of vectors per unit. If the factor is 1, a large tensor does not change, and this number keeps the number
/// of cubes small.
const SCALED_VECTORS: u32 = 32;

#[cube(launch_unchecked)]
fn scale_kernel<F: Float, N: Size>(
    x: &mut [Vector<F, N>],
    factor: &[f32],
    vectors: u32,
    #[define(F)] _dtype: ElemType,
) {
    let factor = factor[0];
    // `!=` is true for NaN by definition, but WGSL may assume that there are no NaNs.
    let is_one = factor == 1.0;
    if !is_one {
        for step in 0..SCALED_VECTORS {
            let block = CUBE_POS * SCALED_VECTORS as usize + step as usize;
            let at = block * UNITS as usize + UNIT_POS as usize;
            if at < vectors as usize {
                let product = Vector::<f32, N>::cast_from(x[at]) * Vector::new(factor);
                x[at] = Vector::cast_from(product);
            }
        }
    }
}

/// Computes [`scale`](super::scale). The tensor must be contiguous and have at least one element.
pub(super) fn scale(x: CubeTensor, factor: CubeTensor) -> CubeTensor {
    let x = own(x);
    let client = x.client.clone();
    let count = x.shape().num_elements();
    let vector = RowPlan::new(&client, x.dtype, count).vector;
    let vectors = count / vector;
    // SAFETY: vectors past the end are skipped.
    unsafe {
        launch!(
            scale_kernel,
            [
                client,
                vectors.div_ceil((UNITS * SCALED_VECTORS) as usize),
                UNITS
            ],
            [vector],
            [&x, factor],
            (vectors as u32),
            (dtype_to_storage_type(x.dtype))
        );
    }
    x
}

/// Adds the kernels that write or add values of every type to an f32 buffer, and 16-bit values to a buffer of the same
/// type. Also adds the kernel that clears an f32 buffer, and the kernels that scale every type.
pub(crate) fn aot_instances(list: &mut AotList) {
    let [(_, single, lanes), halves @ ..] = types();
    for add in [false, true] {
        let form = if add { "add" } else { "write" };
        for (values, dtype, _) in types() {
            if add || dtype == single {
                instance!(
                    list.streaming("accumulate/{form}/f32/{values}"), UNITS,
                    accumulate_kernel::AccumulateKernel [_ _ _ _] (lanes, add, [single, dtype])
                );
            } else {
                // Only the 16-bit values are read, 64 bits at a time.
                instance!(
                    list.other("accumulate/{form}/f32/{values}"), UNITS,
                    accumulate_kernel::AccumulateKernel [_ _ _ _] (lanes, add, [single, dtype])
                );
            }
        }
        for (half, dtype, lanes) in halves {
            instance!(
                list.streaming("accumulate/{form}/{half}/{half}"), UNITS,
                accumulate_kernel::AccumulateKernel [_ _ _ _] (lanes, add, [dtype; 2])
            );
        }
    }
    instance!(
        list.other("clear/f32"), UNITS,
        clear_kernel::ClearKernel [_ _ _] (lanes, lanes as u32, single)
    );
    for (name, dtype, lanes) in types() {
        instance!(
            list.streaming("scale/{name}"), UNITS,
            scale_kernel::ScaleKernel [_ _ _] (lanes, dtype)
        );
    }
}
