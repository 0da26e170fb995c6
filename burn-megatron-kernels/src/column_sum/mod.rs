//! Sums over the rows of a matrix, such as the gradient of a bias.
//!
//! Sums are computed in f32 (f64 for f64), in an order that depends only on the sizes. The operations are not
//! differentiable: autodiff does not record them.

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Device, Tensor};

use crate::cpu::wide;
use crate::gradient::{self, Destination, FlatGradients};
use crate::launch::{SimpleOp, Spec, launch_one};

pub(crate) mod cpu;
#[cfg(feature = "cubecl")]
pub(crate) mod kernel;
#[cfg(test)]
mod tests;

const NAME: &str = "column_sum";

/// Returns the sum over the rows of `x`, `[rows, columns]`. The result is `[columns]` in f32 (f64 for f64).
///
/// If `target` is given, the sum is written to or added to its flat buffer, and the function returns the flat buffer.
/// `target` must have exactly one place. The buffer is updated in place if no other tensor shares its memory. If `x`
/// has no rows, the sum is 0.
///
/// # Panics
///
/// Panics with a [`KernelError`](crate::KernelError) if the place extends beyond the end of the buffer, or if the type
/// of the buffer does not match the type of `x`.
///
/// # Example
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_megatron_kernels::column_sum::column_sum;
/// use burn_megatron_kernels::gradient::{FlatGradients, Place};
///
/// let x = Tensor::<2>::full([3, 2], 2.0, &Device::flex());
/// let target = FlatGradients {
///     flat: Tensor::ones([4], &Device::flex()),
///     places: vec![Place { offset: 1, add: true }],
/// };
/// let flat = column_sum(x, Some(target));
/// let values: Vec<f32> = flat.into_data().try_into_vec().unwrap();
/// assert_eq!(values, [1.0, 7.0, 7.0, 1.0]);
/// ```
pub fn column_sum(x: Tensor<2>, target: Option<FlatGradients>) -> Tensor<1> {
    let [_, columns] = x.dims();
    sum_of_rows(x.into_dispatch(), columns, target)
}

/// Computes the gradient of a bias `[columns]` that was added to an output `[.., columns]`. Call it in the backward
/// pass of a [`Function`](crate::Function).
///
/// `gradient` is the gradient of the output. With a destination, the bias gradient is written to the flat buffer, and
/// the function returns `None`. Without a destination, the function returns the bias gradient in `dtype`. If `dtype` is
/// also `None`, the bias gradient is not computed.
///
/// # Panics
///
/// Panics in the same cases as [`column_sum`] and [`gradient::accumulate`].
pub fn bias_gradient(
    gradient: DispatchTensor,
    dtype: Option<DType>,
    destination: Option<&Destination>,
) -> Option<DispatchTensor> {
    let columns = *gradient.shape().last()?;
    match destination {
        Some(destination) => gradient::accumulate(&[destination], |target| {
            (None, vec![sum_of_rows(gradient, columns, target)])
        }),
        None => {
            let sum = |dtype| sum_of_rows(gradient, columns, None).cast::<DType>(dtype);
            dtype.map(sum).map(Tensor::into_dispatch)
        }
    }
}

/// Computes [`column_sum`] of `x`, `[.., columns]`.
fn sum_of_rows(x: DispatchTensor, columns: usize, target: Option<FlatGradients>) -> Tensor<1> {
    let (device, dtype) = (Device::new(x.device()), x.dtype());
    let (flat, places) = gradient::split(NAME, target, columns, dtype);
    if columns == 0 {
        let options = (&device, wide(dtype));
        return flat.map_or_else(|| Tensor::empty([0], options), Tensor::from_dispatch);
    }
    let sum = Spec::new([columns], wide(dtype));
    let op = SimpleOp {
        name: NAME,
        parameters: (columns, places.map(|places| places[0])),
        outputs: vec![flat.as_ref().map_or(sum, Spec::of_any)],
        cpu: cpu::column_sum,
        #[cfg(feature = "cubecl")]
        cube: kernel::sum_of_rows,
    };
    let inputs = [Some(x), flat].into_iter().flatten();
    Tensor::from_dispatch(launch_one(op, inputs.collect()))
}
