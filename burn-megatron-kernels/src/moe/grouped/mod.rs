//! Grouped GEMM: multiplies the rows of each expert by the weights of this expert.
//!
//! Rows are sorted by expert, with `group_sizes[e]` rows for expert `e`, as in
//! [`RowMap`](super::permutation::RowMap):
//!
//! ```text
//! y_e = x_e W_e      dx_e = dy_e W_e^T      dW_e = x_e^T dy_e
//! ```
//!
//! Sums are computed in f32 (f64 for f64). If an expert has no rows, the gradient of its weights is exactly 0.
//!
//! On the CPU, blocks of rows are multiplied in parallel, with one thread per block. The result does not depend on the
//! number of threads.
//!
//! On CUDA devices with compute capability 8.0 or later, one kernel launch with `mma.sync` computes all experts if
//! - the type is f16 or bf16,
//! - `in` and `out` are multiples of 8,
//! - the multiplication of a single expert is too small to use the whole GPU. It uses the whole GPU if its result has
//!   at least 4 tiles of 128 by 128 per multiprocessor.
//!
//! In all other cases, and on other CubeCL devices, the [engine](crate::gemm) for single matrix multiplications
//! computes one expert after the other. In this case, the number of kernel launches is the number of experts that have
//! rows.

use std::sync::Arc;

use burn::tensor::Tensor;

use crate::cpu::wide;
use crate::error::{accept, check_same_type, check_shape, check_sum_type};
use crate::flat::check_range;
use crate::gradient::Destination;
use crate::launch::launch_one;
use crate::{KernelError, apply};

mod backward;
pub mod composed;
mod cpu;
#[cfg(feature = "cubecl")]
mod cube;
#[cfg(feature = "cubecl")]
pub(crate) mod mma;
#[cfg(test)]
mod tests;

pub use backward::GroupedMatmul;
use backward::WeightGradientOp;

const NAME: &str = "grouped_matmul";

/// Multiplies the rows of each expert by the weights of this expert.
///
/// - `x`: `[rows, in]`, sorted by expert.
/// - `weights`: `[experts, in, out]`, in the type of `x`.
/// - `group_sizes`: the number of rows of each expert.
/// - returns `[rows, out]` in the type of `x`.
///
/// To compute the gradient of the input, call this function with the gradient of the result and `weights.swap_dims(1,
/// 2)`. Weights that are transposed in this way are not copied. The function is differentiable in `x` and `weights`.
///
/// # Panics
///
/// Panics with a [`KernelError`] if sizes or types do not match.
///
/// # Example
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_megatron_kernels::moe::grouped::grouped_matmul;
///
/// let device = Device::flex();
/// let x = Tensor::<2>::from_floats([[1.0], [2.0], [3.0]], &device);
/// let weights = Tensor::<3>::from_floats([[[1.0]], [[10.0]], [[100.0]]], &device);
/// let y: Vec<f32> = grouped_matmul(x, weights, &[2, 0, 1]).into_data().try_into_vec().unwrap();
/// assert_eq!(y, [1.0, 2.0, 300.0]);
/// ```
pub fn grouped_matmul(x: Tensor<2>, weights: Tensor<3>, group_sizes: &[usize]) -> Tensor<2> {
    grouped_matmul_with(x, weights, None, group_sizes)
}

/// Computes [`grouped_matmul`] with weights whose gradient can be written to a flat buffer. If there is a destination,
/// `weights` must not be tracked by autodiff.
///
/// # Panics
///
/// Panics in the same cases as [`grouped_matmul`].
pub fn grouped_matmul_with(
    x: Tensor<2>,
    weights: Tensor<3>,
    destination: Option<Destination>,
    group_sizes: &[usize],
) -> Tensor<2> {
    let function = GroupedMatmul::new((x.dims(), x.dtype()), &weights, destination, group_sizes);
    apply(vec![x.into_dispatch(), weights.into_dispatch()], function)
}

/// Returns the gradient of the weights of [`grouped_matmul`], `[experts, in, out]` in the type of `x`.
///
/// - `x`: `[rows, in]`.
/// - `gradient`: `[rows, out]`, the gradient of the result.
///
/// The function is not differentiable.
///
/// # Panics
///
/// Panics with a [`KernelError`] if sizes or types do not match.
pub fn grouped_weight_gradient(
    x: Tensor<2>,
    gradient: Tensor<2>,
    group_sizes: &[usize],
) -> Tensor<3> {
    let ([_, inputs], [_, outputs]) = (x.dims(), gradient.dims());
    let shape = [group_sizes.len(), inputs, outputs];
    let (device, dtype) = (x.device(), x.dtype());
    let length = shape.iter().product::<usize>();
    if length == 0 {
        return Tensor::zeros(shape, (&device, dtype));
    }
    let flat = Tensor::empty([length], (&device, wide(dtype)));
    let flat = accumulate_grouped_weight_gradient_at(x, gradient, group_sizes, flat, 0, false);
    let weights = flat.reshape(shape);
    if wide(dtype) == dtype {
        weights
    } else {
        weights.cast(dtype)
    }
}

/// Computes the gradient of the weights of [`grouped_matmul`] and writes it to `flat`, starting at element `offset`. If
/// `add` is true, adds the gradient to the existing elements. `flat` is updated in place if no other tensor shares its
/// memory.
///
/// - `x`: `[rows, in]`.
/// - `gradient`: `[rows, out]`, the gradient of the result, in the type of `x`.
/// - `flat`: `[length]` in f32 (f64 for f64). The gradient has `experts * in * out` elements. They are stored expert by
///   expert, and row by row for each expert.
///
/// If an expert has no rows, its gradient is 0. The function is not differentiable.
///
/// # Panics
///
/// Panics with a [`KernelError`] if sizes or types do not match, or if the gradient extends beyond the end of the
/// buffer.
///
/// # Example
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_megatron_kernels::moe::grouped::accumulate_grouped_weight_gradient_at;
///
/// let device = Device::flex();
/// let x = Tensor::<2>::ones([3, 1], &device);
/// let gradient = Tensor::full([3, 1], 2.0, &device);
/// let flat = Tensor::ones([4], &device);
/// let flat = accumulate_grouped_weight_gradient_at(x, gradient, &[1, 0, 2], flat, 1, true);
/// let values: Vec<f32> = flat.into_data().try_into_vec().unwrap();
/// assert_eq!(values, [1.0, 3.0, 1.0, 5.0]);
/// ```
pub fn accumulate_grouped_weight_gradient_at(
    x: Tensor<2>,
    gradient: Tensor<2>,
    group_sizes: &[usize],
    flat: Tensor<1>,
    offset: usize,
    add: bool,
) -> Tensor<1> {
    let ([rows, inputs], [others, outputs]) = (x.dims(), gradient.dims());
    let shape = [group_sizes.len(), inputs, outputs];
    accept(check([rows, inputs], shape, group_sizes));
    accept(check_shape(NAME, rows == others, || {
        format!("x has {rows} rows, the gradient {others}: expected equal numbers of rows")
    }));
    let (dtype, of_gradient, of_flat) =
        (x.dtype(), "type of the gradient", "type of the flat buffer");
    accept(check_same_type(NAME, dtype, of_gradient, gradient.dtype()));
    accept(check_range(NAME, &flat, offset, &shape));
    accept(check_sum_type(NAME, dtype, of_flat, flat.dtype()));
    if inputs * outputs == 0 {
        return flat;
    }
    let op = WeightGradientOp {
        group_sizes: Arc::from(group_sizes),
        offset,
        add,
    };
    let inputs = vec![
        x.into_dispatch(),
        gradient.into_dispatch(),
        flat.into_dispatch(),
    ];
    Tensor::from_dispatch(launch_one(op, inputs))
}

fn check(
    [rows, inputs]: [usize; 2],
    weights: [usize; 3],
    group_sizes: &[usize],
) -> Result<(), KernelError> {
    let total = group_sizes
        .iter()
        .fold(0usize, |sum, size| sum.saturating_add(*size));
    let groups = group_sizes.len();
    let fits = weights[0] == groups && weights[1] == inputs && total == rows;
    check_shape(NAME, fits, || {
        format!(
            "x is [{rows}, {inputs}], the weights {weights:?}, with {groups} groups of {total} rows: expected [rows, in], \
             [experts, in, out], and a group for each expert, of all rows together"
        )
    })
}

/// Returns the index, the first row and the number of rows of each expert.
fn groups(sizes: &[usize]) -> impl Iterator<Item = (usize, usize, usize)> {
    let mut end = 0;
    let group = move |(expert, size): (usize, &usize)| {
        let first = end;
        end += size;
        (expert, first, *size)
    };
    sizes.iter().enumerate().map(group)
}
