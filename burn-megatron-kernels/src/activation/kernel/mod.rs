//! The CubeCL implementation.
//!
//! The forward, and the backward of the input alone, are element-wise ([`elements`]) with a tuned
//! work split ([`launch`]). Gradients of the bias and of the row weight need sums ([`sums`]), which
//! the same pass computes; a second, small kernel adds the partial sums of the cubes in a fixed
//! order.

use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::{ComptimeOptionArgs, CubeDim, SequenceArg};

use super::backward::{FusedActivation, RequestedGradients};
use crate::cube::{Reduction, RowPlan, empty, grid};

macro_rules! optional {
    ($tensor:expr) => {
        ComptimeOptionArgs::from($tensor.map(CubeTensor::into_tensor_arg))
    };
}

mod aot_instances;
mod elements;
mod formula;
mod launch;

mod sums;

pub(crate) use aot_instances::aot_instances;
use formula::ActivationVariant;
use launch::ElementwiseLaunch;
use sums::{FOLD_PARTS, FOLD_SUMS, SUM_UNITS, SumTiling, fold_kernel, sums_kernel};

/// Number of cubes that fills a large device.
const TARGET_CUBES: usize = 2048;
/// Rows that a cube has at least where it sums over them, so that the partial sums are few.
const MIN_SUMMED_ROWS: usize = 16;

/// The sizes and the variant shared by the kernels of one call.
#[derive(Clone, Copy)]
struct ActivationPlan {
    variant: ActivationVariant,
    /// Width of the input.
    width: usize,
    rows: usize,
    row: RowPlan,
    clamp: f32,
    offset: f32,
}

impl ActivationPlan {
    fn new(fused: &FusedActivation, x: &CubeTensor) -> Self {
        let shape = x.shape();
        let width = shape.iter().copied().last().unwrap_or(1);
        let options = fused.options;
        Self {
            variant: ActivationVariant {
                curve: fused.kind.curve(),
                gated: fused.kind.is_gated(),
                clamped: options.clamp.is_some(),
            },
            width,
            rows: shape.num_elements() / width.max(1),
            row: RowPlan::new(&x.client, x.dtype, fused.kind.output_width(width)),
            clamp: options.clamp.unwrap_or(0.0) as f32,
            offset: options.offset as f32,
        }
    }

    /// Vectors of the output.
    fn vectors(&self) -> usize {
        self.rows * self.row.columns
    }
}

/// The output of `inputs`, see [`FusedActivation`].
pub(super) fn forward(fused: &FusedActivation, inputs: Vec<CubeTensor>) -> CubeTensor {
    let (x, bias, weight) = fused.split(inputs);
    let plan = ActivationPlan::new(fused, &x);
    let mut shape: Vec<usize> = x.shape().iter().copied().collect();
    if let Some(width) = shape.last_mut() {
        *width = fused.kind.output_width(*width);
    }
    let y = empty(&x, shape, x.dtype);
    ElementwiseLaunch {
        plan,
        x,
        bias,
        weight,
        gradient: None,
        output: y.clone(),
    }
    .launch();
    y
}

/// The requested gradients, see [`FusedActivation`]; the last input is the gradient of the output.
pub(super) fn backward(
    fused: &FusedActivation,
    wanted: RequestedGradients,
    mut inputs: Vec<CubeTensor>,
) -> Vec<CubeTensor> {
    let Some(gradient) = inputs.pop() else {
        unreachable!("the last input of a backward is the gradient")
    };
    let plan = ActivationPlan::new(fused, &inputs[0]);
    if wanted.bias || wanted.weight {
        sums(fused, &plan, wanted, inputs, gradient)
    } else {
        let (x, bias, weight) = fused.split(inputs);
        let dx = empty(&x, x.shape(), x.dtype);
        ElementwiseLaunch {
            plan,
            x,
            bias,
            weight,
            gradient: Some(gradient),
            output: dx.clone(),
        }
        .launch();
        vec![dx]
    }
}

fn sums(
    fused: &FusedActivation,
    plan: &ActivationPlan,
    wanted: RequestedGradients,
    inputs: Vec<CubeTensor>,
    gradient: CubeTensor,
) -> Vec<CubeTensor> {
    let (x, bias, weight) = fused.split(inputs);
    let (client, dtype) = (x.client.clone(), x.dtype);
    let units = plan.row.units.min(SUM_UNITS);
    let columns = plan.row.columns;
    // Only the bias needs a unit to stay on its columns.
    let tile = if wanted.bias { units as usize } else { columns };
    let tiles = columns.div_ceil(tile.max(1));
    let rows_per_cube = if wanted.bias {
        (plan.rows * tiles)
            .div_ceil(TARGET_CUBES)
            .max(MIN_SUMMED_ROWS)
    } else {
        1
    };
    let blocks = match plan.vectors() {
        0 => 0,
        _ => plan.rows.div_ceil(rows_per_cube),
    };
    let tiles = if blocks == 0 { 0 } else { tiles };

    let dx = wanted.x.then(|| empty(&x, x.shape(), dtype));
    let partial = |size: usize| empty(&x, [size.max(1)], DType::F32);
    let dbias = wanted.bias.then(|| partial(blocks * plan.width));
    let dweight = wanted.weight.then(|| partial(plan.rows * tiles));
    if blocks > 0 {
        let tiling = SumTiling {
            columns,
            tile,
            units,
            planes: plan.row.reduction == Reduction::Planes,
        };
        unsafe {
            sums_kernel::launch_unchecked(
                &client,
                grid(&client, blocks * tiles),
                CubeDim::new_1d(units),
                plan.row.vector,
                x.into_tensor_arg(),
                optional!(bias),
                optional!(weight),
                gradient.into_tensor_arg(),
                sequence(&dx),
                sequence(&dbias),
                sequence(&dweight),
                plan.clamp,
                plan.offset,
                plan.rows as u32,
                rows_per_cube as u32,
                tiling,
                plan.variant,
                dtype_to_storage_type(dtype),
            );
        }
    }
    let dbias = dbias.map(|parts| fold(parts, dtype, plan.width, blocks, (1, plan.width)));
    let dweight = dweight.map(|parts| match tiles {
        // One cube had the whole row: its sum is the gradient.
        1 => parts,
        _ => fold(parts, DType::F32, plan.rows, tiles, (tiles, 1)),
    });
    [dx, dbias, dweight].into_iter().flatten().collect()
}

fn sequence<T>(tensor: &Option<CubeTensor>) -> SequenceArg<T>
where
    SequenceArg<T>: FromIterator<cubecl::prelude::TensorArg>,
    T: cubecl::prelude::LaunchArg,
{
    tensor
        .iter()
        .map(|tensor| tensor.clone().into_tensor_arg())
        .collect()
}

/// `length` sums of `count` parts each, which are `strides.1` apart; the sums are `strides.0` apart.
fn fold(
    parts: CubeTensor,
    dtype: DType,
    length: usize,
    count: usize,
    strides: (usize, usize),
) -> CubeTensor {
    let client = parts.client.clone();
    let sums = empty(&parts, [length], dtype);
    if length > 0 {
        unsafe {
            fold_kernel::launch_unchecked(
                &client,
                grid(&client, length.div_ceil(FOLD_SUMS as usize)),
                CubeDim::new_1d(FOLD_SUMS * FOLD_PARTS),
                parts.into_tensor_arg(),
                sums.clone().into_tensor_arg(),
                length as u32,
                count as u32,
                strides.0 as u32,
                strides.1 as u32,
                dtype_to_storage_type(dtype),
            );
        }
    }
    sums
}
