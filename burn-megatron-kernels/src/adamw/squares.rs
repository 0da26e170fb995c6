//! Sums of squares. The order of summation depends only on the lengths of the buffers.

use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Tensor};

use crate::KernelError;
use crate::cpu::{Element, ROW_GRAIN, Real, for_float, map_tasks, slice, vector, vectorized};
use crate::error::accept;
use crate::launch::{SimpleOp, Spec, launch_one};

/// The number of accumulators per task, which keeps the widest SIMD registers busy.
const LANES: usize = 16;

/// Returns the sum of squares of `x`, `[length]`. The result is `[1]` in f32 (f64 for f64).
///
/// The result does not depend on the number of threads. The CPU adds in f64. Other devices add in f32: first within
/// groups of a fixed size, then the sums of the groups.
///
/// # Panics
///
/// Panics with a [`KernelError`] if the device does not support the type of `x`.
pub fn sum_of_squares(x: Tensor<1>) -> Tensor<1> {
    sum(&[x])
}

/// Returns the sum of squares over all `buffers`, `[1]`. The result is f64 if at least one buffer is f64, and otherwise
/// f32.
///
/// The buffers may differ in type and length, and may have no elements. See [`sum_of_squares`] for the order of the
/// summation.
///
/// # Panics
///
/// Panics with a [`KernelError`] if `buffers` is empty, or if the device does not support the type of a buffer.
pub fn sum_of_squares_of(buffers: &[Tensor<1>]) -> Tensor<1> {
    if buffers.is_empty() {
        let (operation, name) = ("sum_of_squares_of", "number of buffers");
        accept(Err(KernelError::option(operation, name, 0, "1 or more")))
    }
    sum(buffers)
}

fn sum(buffers: &[Tensor<1>]) -> Tensor<1> {
    let double = buffers.iter().any(|buffer| buffer.dtype() == DType::F64);
    let dtype = if double { DType::F64 } else { DType::F32 };
    let op = SimpleOp {
        name: "sum_of_squares",
        parameters: double,
        outputs: vec![Spec::new([1], dtype)],
        cpu: |double, inputs| {
            let squares =
                |input: &FlexTensor| for_float!(input.dtype(), E => squares(slice::<E>(input)));
            let sum: f64 = inputs.iter().map(squares).sum();
            vec![if *double {
                vector(vec![sum])
            } else {
                vector(vec![sum as f32])
            }]
        },
        #[cfg(feature = "cubecl")]
        cube: |_, inputs| vec![super::kernel::sum_of_squares(inputs)],
    };
    let inputs = buffers.iter().map(|buffer| buffer.clone().into_dispatch());
    Tensor::from_dispatch(launch_one(op, inputs.collect()))
}

pub(super) fn squares<E: Element>(x: &[E]) -> f64 {
    let parts = map_tasks(x.chunks(ROW_GRAIN), part);
    parts.into_iter().fold(0.0, |sum, part| sum + part)
}

fn part<E: Element>(x: &[E]) -> f64 {
    vectorized(
        #[inline(always)]
        || {
            let square = |x: &E| {
                let x = x.wide().double();
                x * x
            };
            let mut sums = [0.0; LANES];
            let groups = x.chunks_exact(LANES);
            let rest: f64 = groups.remainder().iter().map(square).sum();
            for group in groups {
                for (sum, x) in sums.iter_mut().zip(group) {
                    *sum += square(x);
                }
            }
            sums.into_iter().sum::<f64>() + rest
        },
    )
}
