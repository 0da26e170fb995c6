//! Sums of squares, added in an order that only the lengths decide.

use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Tensor};
#[cfg(feature = "cubecl")]
use burn_cubecl::tensor::CubeTensor;

use crate::KernelError;
use crate::cpu::{Element, ROW_GRAIN, Real, for_float, map_tasks, slice, vector, vectorized, wide};
use crate::error::accept;
use crate::launch::{DeviceOp, Spec, launch_one};

/// Accumulators of one task: as many as the widest SIMD registers keep busy.
const LANES: usize = 16;

/// The sum of the squares of `x`, `[length]` to `[1]`: f32, or f64 for f64.
///
/// The result does not depend on the number of threads. The CPU sums in f64, other devices in f32,
/// in a tree over groups of a fixed size.
///
/// # Panics
///
/// With a [`KernelError`] for a type that the device does not support.
pub fn sum_of_squares(x: Tensor<1>) -> Tensor<1> {
    Tensor::from_dispatch(launch_one(SumOfSquaresOp, vec![x.into_dispatch()]))
}

/// The sum of the squares of all elements of `buffers`, `[1]`: f64 if one of them is f64, or f32.
///
/// See [`sum_of_squares`]. The buffers may have several types and lengths, 0 included.
///
/// # Panics
///
/// With a [`KernelError`] without a buffer, and for a type that the device does not support.
pub fn sum_of_squares_of(buffers: &[Tensor<1>]) -> Tensor<1> {
    if buffers.is_empty() {
        let (operation, name) = ("sum_of_squares_of", "number of buffers");
        accept(Err(KernelError::option(operation, name, 0, "1 or more")))
    }
    let inputs = buffers.iter().map(|buffer| buffer.clone().into_dispatch());
    Tensor::from_dispatch(launch_one(SumOfSquaresOp, inputs.collect()))
}

#[derive(Debug)]
struct SumOfSquaresOp;

impl DeviceOp for SumOfSquaresOp {
    fn name(&self) -> &'static str {
        "sum_of_squares"
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        let double = inputs.iter().any(|input| wide(input.dtype) == DType::F64);
        let dtype = if double { DType::F64 } else { DType::F32 };
        vec![Spec::new([1], dtype)]
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        let double = inputs.iter().any(|input| input.dtype() == DType::F64);
        let sum: f64 = inputs
            .iter()
            .map(|input| for_float!(input.dtype(), E => squares(slice::<E>(input))))
            .sum();
        vec![if double {
            vector(vec![sum])
        } else {
            vector(vec![sum as f32])
        }]
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        vec![super::kernel::sum_of_squares(inputs)]
    }
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
