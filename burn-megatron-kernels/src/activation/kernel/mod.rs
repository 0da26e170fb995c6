//! The CubeCL implementation.
//!
//! The forward pass is element-wise ([`elements`]) with a tuned work split ([`launch`]), and so is the backward pass if
//! no parameter gradient is requested. The gradients of the bias and of the row weight need sums ([`sums`]), which are
//! computed by the same kernel as the gradient of the input. A second, small kernel adds the partial sums of the cubes
//! in a fixed order.

use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::SequenceArg;

use super::backward::ActivationBackwardOp;
use super::kind::FusedActivation;
use crate::column_sum::kernel::{Partials, SumTarget, fold};
use crate::cube::{RowPlan, empty, launch, launch_tuned};

mod aot_instances;
mod elements;
mod formula;
mod launch;
mod sums;

pub(crate) use aot_instances::aot_instances;
pub(crate) use formula::{ActivationVariant, output};
use launch::ElementwiseLaunch;
use sums::{SUM_UNITS, SumTiling, sums_kernel};

/// The number of cubes that fills a large device.
const TARGET_CUBES: usize = 2048;
/// The minimum number of rows per cube for cubes that sum over rows. It limits the number of partial sums.
const MIN_SUMMED_ROWS: usize = 16;

/// Sizes and variant shared by the kernels of one call.
#[derive(Clone, Copy)]
struct ActivationPlan {
    variant: ActivationVariant,
    /// The width of the input.
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
            variant: (*fused).into(),
            width,
            rows: shape.num_elements() / width.max(1),
            row: RowPlan::new(&x.client, x.dtype, fused.kind.output_width(width)),
            clamp: options.clamp.unwrap_or(0.0) as f32,
            offset: options.offset as f32,
        }
    }

    /// Returns the number of vectors in the output.
    fn vectors(&self) -> usize {
        self.rows * self.row.columns
    }
}

/// Computes the output of `inputs`; see [`FusedActivation`].
pub(super) fn forward(fused: &FusedActivation, inputs: Vec<CubeTensor>) -> CubeTensor {
    let plan = ActivationPlan::new(fused, &inputs[0]);
    let mut shape = inputs[0].shape().to_vec();
    if let Some(width) = shape.last_mut() {
        *width = fused.kind.output_width(*width);
    }
    let output = empty(&inputs[0], shape, inputs[0].dtype);
    elementwise(fused, plan, inputs, None, output)
}

/// Computes the gradients; see [`ActivationBackwardOp`].
pub(super) fn backward(op: &ActivationBackwardOp, mut inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
    let (fused, wanted) = (&op.fused, op.wanted);
    let flat = op.place.and_then(|_| inputs.pop());
    let Some(gradient) = inputs.pop() else {
        unreachable!("the last input of a backward is the gradient")
    };
    let plan = ActivationPlan::new(fused, &inputs[0]);
    if wanted.bias || wanted.weight {
        let of_bias = SumTarget::new(flat, op.place, gradient.dtype);
        sums(op, &plan, inputs, gradient, of_bias)
    } else {
        let dx = empty(&inputs[0], inputs[0].shape(), inputs[0].dtype);
        vec![elementwise(fused, plan, inputs, Some(gradient), dx)]
    }
}

/// Computes the output, or the gradient of the input if the gradient of the output is given.
fn elementwise(
    fused: &FusedActivation,
    plan: ActivationPlan,
    inputs: Vec<CubeTensor>,
    gradient: Option<CubeTensor>,
    output: CubeTensor,
) -> CubeTensor {
    let (x, bias, weight) = fused.split(inputs);
    if plan.vectors() > 0 {
        launch_tuned(ElementwiseLaunch {
            plan,
            x,
            bias,
            weight,
            gradient,
            output: output.clone(),
        });
    }
    output
}

fn sums(
    op: &ActivationBackwardOp,
    plan: &ActivationPlan,
    inputs: Vec<CubeTensor>,
    gradient: CubeTensor,
    of_bias: SumTarget,
) -> Vec<CubeTensor> {
    let wanted = op.wanted;
    let (x, bias, weight) = op.fused.split(inputs);
    let (client, dtype) = (x.client.clone(), x.dtype);
    let units = plan.row.units.min(SUM_UNITS);
    let columns = plan.row.columns;
    // Only with a bias gradient does a unit have to keep its columns.
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
            planes: plan.row.planes(),
        };
        unsafe {
            launch!(
                sums_kernel,
                [client, blocks * tiles, units],
                [plan.row.vector],
                [x, bias, weight, gradient],
                [sequence(&dx), sequence(&dbias), sequence(&dweight)],
                (plan.clamp, plan.offset, plan.rows as u32),
                (rows_per_cube as u32),
                (tiling, plan.variant, dtype_to_storage_type(dtype))
            );
        }
    }
    let mut gradients = Vec::from_iter(dx);
    if let Some(parts) = dbias {
        let partials = Partials::of_rows(parts, plan.width, blocks);
        gradients.extend(fold(partials, of_bias));
    }
    match (dweight, tiles) {
        (None, _) => {}
        // The single cube has the complete row, so its sum is the gradient.
        (Some(parts), 1) => gradients.push(parts),
        (Some(tensor), _) => {
            let partials = Partials {
                tensor,
                width: plan.rows,
                count: tiles,
                first: 0,
                stride: tiles,
                step: 1,
            };
            gradients.extend(fold(partials, SumTarget::Each(DType::F32)));
        }
    }
    gradients
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
