//! The kernel for the gradients of the input and of the bias.
//!
//! Each unit processes a fixed set of columns and every n-th row, so that each group of rows gives one partial sum. A
//! second kernel adds the partial sums in order.

use burn::backend::TensorMetadata;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::super::RowSizes;
use super::super::backward::DropoutBackwardOp;
use super::forward::elementwise;
use super::*;
use crate::column_sum::kernel::{Partials, STRIP_UNITS, Strips, SumTarget, fold};
use crate::cube::instance::{AotList, instance, types};
use crate::cube::{empty, launch};

#[cube(launch_unchecked)]
fn summed_gradient_kernel<O: Float, I: Float, N: Size>(
    gradient: &Tensor<Vector<O, N>>,
    result: &mut Tensor<Vector<I, N>>,
    partial: &mut Tensor<Vector<f32, N>>,
    mask: &MaskArgs,
    rows: usize,
    columns: usize,
    strips: usize,
    cubes_of_row: usize,
    #[comptime] across: usize,
    #[comptime] each: usize,
    #[comptime] draws: MaskAlignment,
    #[define(O, I)] _types: [ElemType; 2],
) {
    let unit = UNIT_POS as usize;
    let group = CUBE_POS % cubes_of_row * across + unit % across;
    let down = comptime!(STRIP_UNITS as usize / across);
    let strip = CUBE_POS / cubes_of_row * down + unit / across;
    let first = group * each;
    if strip < strips && first < columns {
        let lanes = N::value().comptime();
        let mut sums = Array::<Vector<f32, N>>::new(each);
        #[unroll]
        for i in 0..each {
            sums[i] = Vector::new(0.0f32);
        }
        let mut row = strip;
        while row < rows {
            let base = row * columns + first;
            let element = (base * N::value()) as u32;
            let factors = factors(mask, element, comptime!(each * lanes), draws);
            #[unroll]
            for i in 0..each {
                if first + i < columns {
                    let value = Vector::<f32, N>::cast_from(gradient[base + i]);
                    let value = masked(value, &factors, i, draws);
                    result[base + i] = Vector::cast_from(value);
                    sums[i] += value;
                }
            }
            row += strips;
        }
        #[unroll]
        for i in 0..each {
            if first + i < columns {
                partial[strip * columns + first + i] = sums[i];
            }
        }
    }
}

pub(in super::super) fn backward(
    op: &DropoutBackwardOp,
    mut inputs: Vec<CubeTensor>,
) -> Vec<CubeTensor> {
    let gradient = inputs.remove(0);
    if !op.bias {
        return vec![elementwise(gradient, None, None, op.input, op.mask)];
    }
    let target = SumTarget::new(inputs.pop(), op.place, DType::F32);
    summed(op, gradient, target)
}

/// Returns the gradient of the input, and the sum of its rows.
fn summed(op: &DropoutBackwardOp, gradient: CubeTensor, target: SumTarget) -> Vec<CubeTensor> {
    let client = gradient.client.clone();
    let RowSizes { elements, width } = op.sizes;
    let result = empty(&gradient, gradient.shape(), op.input);
    let vector = vector(&client, &[gradient.dtype, op.input], width);
    let each = WORDS.div_ceil(vector);
    let rows = elements / width;
    let strips = Strips::new(rows, width.div_ceil(each * vector));
    let partials = empty(&gradient, [strips.count, width], DType::F32);
    let types = [gradient.dtype, op.input].map(dtype_to_storage_type);
    let is_aligned = op.mask.as_ref().map(DropoutMask::is_aligned);
    let draws = MaskAlignment::new(is_aligned, width);
    // SAFETY: a unit past the strips or the columns accesses no memory.
    unsafe {
        launch!(
            summed_gradient_kernel,
            [client, strips.cubes(), STRIP_UNITS],
            [vector],
            [gradient, &result, &partials],
            (MaskArgs::launch(op.mask.as_ref()), rows, width / vector),
            (strips.count, strips.cubes_of_row),
            (strips.across, each, draws, types)
        );
    }
    let partials = Partials::of_rows(partials, width, strips.count);
    [vec![result], fold(partials, target)].concat()
}

/// Adds instances with rows of 4096 elements for every mask alignment.
pub(super) fn aot_instances(list: &mut AotList) {
    for (name, element, vector) in types() {
        for draws in [
            MaskAlignment::None,
            MaskAlignment::Aligned,
            MaskAlignment::Any,
        ] {
            instance!(
                list.streaming("bias_dropout_add/backward/{name}/4096/{draws:?}"), STRIP_UNITS,
                summed_gradient_kernel::SummedGradientKernel [_ _ _ _ _ _ _ _]
                (vector, STRIP_UNITS as usize, WORDS.div_ceil(vector), draws, [element; 2])
            );
        }
    }
}
