//! Gradients of the input and of the bias in one pass.
//!
//! Each unit keeps its columns and walks down every n-th row, so that each group of rows gives one
//! partial sum; a second kernel adds the partial sums in order.

use burn::backend::TensorMetadata;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::super::RowSizes;
use super::super::backward::DropoutBackwardOp;
use super::forward::elementwise;
use super::*;
use crate::cube::instance::{AotInstance, AotTarget, kernel, types};
use crate::cube::{empty, grid};

/// Minimum rows per partial sum, so that there are few partial sums.
const MIN_PARTIAL_ROWS: usize = 16;
/// Units that fill a large device; there are no more partial sums than these need.
const MAX_UNITS: usize = 1 << 19;
/// Columns of a cube of the second kernel.
const SUM_COLUMNS: u32 = 32;

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
    #[comptime] units: u32,
    #[define(O, I)] _types: [ElemType; 2],
) {
    let unit = UNIT_POS as usize;
    let group = CUBE_POS % cubes_of_row * across + unit % across;
    let strip = CUBE_POS / cubes_of_row * (units as usize / across) + unit / across;
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

/// Adds `strips` partial sums of each column: each unit of a column adds every n-th of them, and
/// the first unit adds the results.
#[cube(launch_unchecked)]
fn sum_partials_kernel(
    partial: &Tensor<f32>,
    sum: &mut Tensor<f32>,
    width: usize,
    strips: usize,
    #[comptime] units: u32,
) {
    let across = comptime!(SUM_COLUMNS as usize);
    let along = comptime!((units / SUM_COLUMNS) as usize);
    let unit = UNIT_POS as usize;
    let column = CUBE_POS * across + unit % across;
    let mut shared = Shared::<[f32]>::new_slice(units as usize);
    let mut own = 0.0f32;
    if column < width {
        let mut strip = unit / across;
        while strip < strips {
            own += partial[strip * width + column];
            strip += along;
        }
    }
    shared[unit] = own;
    sync_cube();
    if unit < across && column < width {
        let mut total = 0.0f32;
        for i in 0..along {
            total += shared[i * across + unit];
        }
        sum[column] = total;
    }
}

pub(in super::super) fn backward(
    kernel: &DropoutBackwardOp,
    mut inputs: Vec<CubeTensor>,
) -> Vec<CubeTensor> {
    let gradient = inputs.remove(0);
    if kernel.bias {
        summed(kernel.sizes, kernel.mask, kernel.input, gradient)
    } else {
        vec![elementwise(gradient, None, None, kernel.input, kernel.mask)]
    }
}

fn summed(
    sizes: RowSizes,
    mask: Option<DropoutMask>,
    dtype: DType,
    gradient: CubeTensor,
) -> Vec<CubeTensor> {
    let client = gradient.client.clone();
    let RowSizes { elements, width } = sizes;
    let result = empty(&gradient, gradient.shape(), dtype);
    let vector = vector(&client, &[gradient.dtype, dtype], width);
    let each = WORDS.div_ceil(vector);
    let groups = width.div_ceil(each * vector);
    let across = groups.next_power_of_two().min(UNITS as usize);
    let down = UNITS as usize / across;
    let rows = elements / width;
    let strips = rows
        .div_ceil(MIN_PARTIAL_ROWS)
        .min(MAX_UNITS.div_ceil(groups));
    let cubes_of_row = groups.div_ceil(across);
    let partial = empty(&gradient, [strips, width], DType::F32);
    let types = [gradient.dtype, dtype].map(dtype_to_storage_type);
    unsafe {
        summed_gradient_kernel::launch_unchecked(
            &client,
            grid(&client, cubes_of_row * strips.div_ceil(down)),
            CubeDim::new_1d(UNITS),
            vector,
            gradient.into_tensor_arg(),
            result.clone().into_tensor_arg(),
            partial.clone().into_tensor_arg(),
            MaskArgs::launch(mask.as_ref()),
            rows,
            width / vector,
            strips,
            cubes_of_row,
            across,
            each,
            MaskAlignment::new(mask.as_ref().map(DropoutMask::is_aligned), width),
            UNITS,
            types,
        );
    }
    vec![result, sum_of_partials(partial, strips, width)]
}

fn sum_of_partials(partial: CubeTensor, strips: usize, width: usize) -> CubeTensor {
    let client = partial.client.clone();
    let sum = empty(&partial, [width], DType::F32);
    let most = client.properties().hardware.max_units_per_cube.min(1024);
    let units = (most / SUM_COLUMNS).max(1) * SUM_COLUMNS;
    unsafe {
        sum_partials_kernel::launch_unchecked(
            &client,
            grid(&client, width.div_ceil(SUM_COLUMNS as usize)),
            CubeDim::new_1d(units),
            partial.into_tensor_arg(),
            sum.clone().into_tensor_arg(),
            width,
            strips,
            units,
        );
    }
    sum
}

/// Rows of 4096 elements with every mask alignment, and the sum of the partial sums.
pub(super) fn aot_instances(target: &AotTarget) -> Vec<AotInstance> {
    let mut all = Vec::new();
    for (name, element, vector) in types() {
        for draws in [
            MaskAlignment::None,
            MaskAlignment::Aligned,
            MaskAlignment::Any,
        ] {
            let kernel = kernel!(
                target, UNITS, summed_gradient_kernel::SummedGradientKernel
                [_ _ _ _ _ _ _ _]
                (vector, UNITS as usize, WORDS.div_ceil(vector), draws, UNITS, [element; 2])
            );
            let name = format!("bias_dropout_add/backward/{name}/4096/{draws:?}");
            all.push(AotInstance::streaming(name, kernel));
        }
    }
    let kernel = kernel!(target, 1024, sum_partials_kernel::SumPartialsKernel [_ _ _ _] (1024));
    all.push(AotInstance::other(
        "bias_dropout_add/strips/f32/1024".into(),
        kernel,
    ));
    all
}
