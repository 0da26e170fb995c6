//! The CubeCL implementation. A first kernel sums strips of rows, and [`fold`] adds these partial sums.

use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use crate::cube::instance::{AotList, instance, types};
use crate::cube::{RowPlan, empty, launch};
use crate::gradient::Place;

mod fold;
mod strips;

pub(crate) use fold::{Partials, SumTarget, fold, fold_sets};
pub(crate) use strips::{STRIP_UNITS, Strips};

/// Sums the rows of a unit's strip in one vector of columns. `partials` is `[strips, columns]`.
#[cube(launch_unchecked)]
fn column_sum_kernel<F: Float, N: Size>(
    x: &Tensor<Vector<F, N>>,
    partials: &mut Tensor<Vector<f32, N>>,
    rows: usize,
    columns: usize,
    strips: usize,
    cubes_of_row: usize,
    #[comptime] across: usize,
    #[define(F)] _dtype: ElemType,
) {
    let unit = UNIT_POS as usize;
    let column = CUBE_POS % cubes_of_row * across + unit % across;
    let down = comptime!(STRIP_UNITS as usize / across);
    let strip = CUBE_POS / cubes_of_row * down + unit / across;
    if strip < strips && column < columns {
        let mut sum = Vector::<f32, N>::new(0.0f32);
        let mut row = strip;
        while row < rows {
            sum += Vector::<f32, N>::cast_from(x[row * columns + column]);
            row += strips;
        }
        partials[strip * columns + column] = sum;
    }
}

/// Computes [`column_sum`] of the first input. With a place, the sum is written to the second input.
pub(super) fn sum_of_rows(
    (columns, place): &(usize, Option<Place>),
    mut inputs: Vec<CubeTensor>,
) -> Vec<CubeTensor> {
    let x = inputs.remove(0);
    let target = SumTarget::new(inputs.pop(), *place, DType::F32);
    column_sum(x, *columns, target)
}

/// Returns the sum of the rows of a tensor. The tensor must have at least one column.
pub(crate) fn column_sum(x: CubeTensor, columns: usize, target: SumTarget) -> Vec<CubeTensor> {
    let client = x.client.clone();
    let rows = x.shape().num_elements() / columns;
    let vector = RowPlan::new(&client, x.dtype, columns).vector;
    let strips = Strips::new(rows, columns / vector);
    let dtype = dtype_to_storage_type(x.dtype);
    let partials = empty(&x, [strips.count.max(1), columns], DType::F32);
    if strips.count > 0 {
        // SAFETY: a unit past the strips or the columns accesses no memory.
        unsafe {
            launch!(
                column_sum_kernel,
                [client, strips.cubes(), STRIP_UNITS],
                [vector],
                [x, &partials],
                (rows, columns / vector, strips.count, strips.cubes_of_row),
                (strips.across, dtype)
            );
        }
    }
    let partials = Partials::of_rows(partials, columns, strips.count);
    fold(partials, target)
}

/// Adds instances for the gradient of the QKV bias in GPT-2 124M, and the instances of [`fold`] for every operation.
pub(crate) fn aot_instances(list: &mut AotList) {
    fold::aot_instances(list);
    for (name, dtype, vector) in types() {
        let across = Strips::new(65_536, 2304 / vector).across;
        instance!(
            list.streaming("column_sum/partials/{name}/2304"), STRIP_UNITS,
            column_sum_kernel::ColumnSumKernel [_ _ _ _ _ _] (vector, across, dtype)
        );
    }
}
