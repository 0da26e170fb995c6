//! The CPU implementation. It processes rows in parallel, and each row in chunks that stay in the L1 cache.
//!
//! Each chunk is converted to f32 buffers (f64 for f64), processed in place and converted back, so that the loops are
//! vectorized for every element type.

use burn::backend::flex::FlexTensor;

use super::backward::ActivationBackwardOp;
use super::kind::{Curve, FusedActivation};
use crate::column_sum::cpu::write;
use crate::cpu::{
    Element, Real, add, for_each_task, map_tasks, rows_per_task, slice, tensor, vectorized,
};

pub(crate) mod curve;
mod rows;

use curve::Gaussian;
use rows::{ActivationRows, GradientTask};

/// The minimum number of rows per task for tasks that sum over rows. It limits the number of partial sums.
const MIN_SUMMED_ROWS: usize = 16;

/// Calls `$body` with the type `$shape` that implements the nonlinearity of a [`Curve`].
macro_rules! for_curve {
    ($curve:expr, $shape:ident => $body:expr) => {
        for_curve!($curve, $shape => $body, Normal, Tanh, Quick, Silu, SquaredRelu)
    };
    ($curve:expr, $shape:ident => $body:expr, $($name:ident),*) => {
        match $curve {
            $(Curve::$name => {
                type $shape = curve::$name;
                $body
            })*
        }
    };
}

/// Computes the output of `inputs`; see [`FusedActivation`].
pub(super) fn forward<E: Element>(fused: &FusedActivation, inputs: Vec<FlexTensor>) -> FlexTensor
where
    E::Wide: Gaussian,
{
    let mut shape = inputs[0].layout().shape().to_vec();
    let width = shape.pop().unwrap_or(1);
    let output_width = fused.kind.output_width(width);
    shape.push(output_width);
    let mut y = vec![E::narrow(<E::Wide as Real>::ZERO); shape.iter().product()];
    if y.is_empty() {
        return tensor(y, shape);
    }
    let rows = ActivationRows::<E>::new(fused, &inputs, width);
    let per_task = rows_per_task(width);
    let task = |(i, y): (usize, &mut [E])| {
        for_curve!(fused.kind.curve(), S => vectorized(
            #[inline(always)]
            || rows.forward::<S>(i * per_task, y)
        ))
    };
    for_each_task(y.chunks_mut(per_task * output_width).enumerate(), task);
    tensor(y, shape)
}

/// Computes the gradients; see [`ActivationBackwardOp`].
pub(super) fn backward<E: Element>(
    op: &ActivationBackwardOp,
    mut inputs: Vec<FlexTensor>,
) -> Vec<FlexTensor>
where
    E::Wide: Gaussian,
{
    let (fused, wanted) = (&op.fused, op.wanted);
    let flat = op.place.and_then(|_| inputs.pop());
    let Some(gradient) = inputs.pop() else {
        unreachable!("the last input of a backward is the gradient")
    };
    let (_, _, weight) = fused.split(&inputs);
    let shape = inputs[0].layout().shape().clone();
    let width = shape.iter().copied().last().unwrap_or(1);
    let rows = ActivationRows::<E>::new(fused, &inputs, width);
    let count = shape.num_elements() / width.max(1);
    let zero = <E::Wide as Real>::ZERO;
    let mut dx = vec![E::narrow(zero); if wanted.x { rows.x.len() } else { 0 }];
    let row_count = weight.map_or(0, |weight| weight.layout().shape().num_elements());
    let mut dweight = vec![zero; if wanted.weight { row_count } else { 0 }];

    let per_task = if wanted.bias {
        rows_per_task(width).max(MIN_SUMMED_ROWS)
    } else {
        rows_per_task(width)
    };
    let mut tasks = Vec::new();
    let mut dxs = dx.chunks_mut((per_task * width).max(1));
    let mut dweights = dweight.chunks_mut(per_task);
    let full = if width == 0 { 0 } else { count };
    for first in (0..full).step_by(per_task) {
        tasks.push(GradientTask {
            first,
            rows: per_task.min(full - first),
            dx: dxs.next(),
            dweight: dweights.next(),
            dbias: wanted.bias.then(|| vec![zero; width]),
        });
    }
    let gradient = slice::<E>(&gradient);
    let task = |mut task: GradientTask<'_, E>| {
        for_curve!(fused.kind.curve(), S => vectorized(
            #[inline(always)]
            || rows.backward::<S>(gradient, &mut task)
        ));
        task.dbias
    };
    let partials = map_tasks(tasks, task);

    let mut outputs = Vec::new();
    if wanted.x {
        outputs.push(tensor(dx, shape));
    }
    if wanted.bias {
        let mut total = vec![zero; width];
        for partial in partials.into_iter().flatten() {
            add(&mut total, &partial);
        }
        let target = flat.zip(op.place.map(|place| vec![place]));
        outputs.extend(write(vec![tensor(total, [width])], E::dtype(), target));
    }
    if wanted.weight {
        outputs.push(tensor(dweight, [row_count]));
    }
    outputs
}
