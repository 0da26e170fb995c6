//! Matrix multiplication (GEMM), and the engine trait that its implementations share.
//!
//! A linear layer uses [`linear`] in its forward pass and [`accumulate_weight_gradient`] in its backward pass.
//! [`accumulate_weight_gradient_at`] writes the weight gradient to a flat buffer that holds many gradients. The
//! gradient of the input is `linear(gradient, weight.transpose(), None)`. This call does not copy the weight, because
//! transposed matrices are read in place. For 16-bit types, the products of elements are exact, and they are summed in
//! f32. A bias is added before the result is rounded.
//!
//! | device | engine |
//! |---|---|
//! | Flex | the `gemm` crate, or a [BLAS library](Blas) |
//! | CUDA | cuBLASLt, on the stream of Burn's kernels |
//! | CUDA if cuBLASLt is missing or rejects the multiplication, and other CubeCL devices | Burn's matmul |
//!
//! [`engine_of`] returns a description of the engine of a device. The operations are not differentiable: autodiff does
//! not record them.

use burn::backend::DispatchDevice;
use burn::tensor::{DType, Device, Tensor};

use crate::KernelError;
use crate::error::{accept, check_same_type, check_shape, check_sum_type};
use crate::flat::check_range;
use crate::launch::launch_one;

pub mod algorithms;
mod blas;
pub mod composed;
pub(crate) mod cpu;
#[cfg(feature = "cubecl")]
pub(crate) mod cube;
#[cfg(feature = "cuda")]
pub(crate) mod cublaslt;
#[cfg(feature = "cuda")]
mod cuda_stream;
mod engine;
pub mod gelu;
pub(crate) mod op;
#[cfg(any(test, feature = "cuda"))]
pub(crate) mod request;
mod row;
#[cfg(target_arch = "x86_64")]
mod row_avx2;
#[cfg(test)]
mod tests;

pub use blas::{Blas, BlasError, CpuGemm, UnknownCpuGemm};
pub use engine::{ColumnMajor, Epilogue, GemmEngine, GemmProblem, Matrix, Operand, Operands};

use op::GemmOp;

/// Computes a linear layer, `x weight + bias`.
///
/// - `x`: `[rows, in]`.
/// - `weight`: `[in, out]`.
/// - `bias`: `[out]`.
/// - returns `[rows, out]`.
///
/// All tensors have the same type. On a given device, the result does not depend on the number of threads. On the CPU,
/// a row of the result does not depend on the other rows or their number.
///
/// # Panics
///
/// Panics with a [`KernelError`] if sizes or types do not match.
///
/// # Example
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_megatron_kernels::gemm::linear;
///
/// let device = Device::flex();
/// let x = Tensor::<2>::ones([4, 3], &device);
/// let weight = Tensor::full([3, 2], 2.0, &device);
/// let y = linear(x, weight, Some(Tensor::ones([2], &device)));
/// assert_eq!(y.dims(), [4, 2]);
/// assert_eq!(y.sum().into_scalar::<f32>(), 8.0 * 7.0);
/// ```
pub fn linear(x: Tensor<2>, weight: Tensor<2>, bias: Option<Tensor<1>>) -> Tensor<2> {
    linear_by(None, x, weight, bias)
}

/// Computes [`linear`] with the given BLAS library on the CPU. Other devices ignore the library.
///
/// # Panics
///
/// Panics in the same cases as [`linear`].
pub fn linear_by(
    blas: Option<Blas>,
    x: Tensor<2>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
) -> Tensor<2> {
    accept(check_linear(&x, &weight, bias.as_ref()));
    let mut inputs = vec![x.into_dispatch(), weight.into_dispatch()];
    inputs.extend(bias.map(Tensor::into_dispatch));
    Tensor::from_dispatch(launch_one(GemmOp::Linear { blas }, inputs))
}

/// Computes the weight gradient `x^T gradient` and adds it to `into`. `into` is updated in place if no other tensor
/// shares its memory.
///
/// - `x`: `[rows, in]`.
/// - `gradient`: `[rows, out]`, in the type of `x`.
/// - `into`: `[in, out]` in f32 (f64 for f64).
///
/// On a given device, the result does not depend on the number of threads. [`accumulate_weight_gradient_at`] is the
/// same operation for a flat buffer.
///
/// # Panics
///
/// Panics with a [`KernelError`] if sizes or types do not match.
pub fn accumulate_weight_gradient(x: Tensor<2>, gradient: Tensor<2>, into: Tensor<2>) -> Tensor<2> {
    accept(check_accumulate(&x, &gradient, &into));
    let [inputs, outputs] = into.dims();
    if inputs * outputs == 0 {
        // Burn's reshape interprets a 0 as "keep this dimension".
        return into;
    }
    let flat = into.reshape([inputs * outputs]);
    weight_gradient(None, x, gradient, flat, 0, true).reshape([inputs, outputs])
}

/// Computes the weight gradient `x^T gradient` and writes it, row by row, to `flat`, starting at element `offset`. If
/// `add` is true, adds it to the existing elements. `flat` is updated in place if no other tensor shares its memory.
///
/// - `x`: `[rows, in]`.
/// - `gradient`: `[rows, out]`, in the type of `x`.
/// - `flat`: `[length]` in f32 (f64 for f64). The weight gradient has `in * out` elements.
///
/// If `x` has no rows, the weight gradient is 0. On a given device, the result does not depend on the number of
/// threads.
///
/// The result is written directly to the buffer on the CPU. On CUDA, it is written directly if the first element is at
/// a multiple of 16 bytes in the buffer. Otherwise it is first written to a temporary tensor, and
/// [`flat::accumulate`](crate::flat::accumulate) writes it to the buffer.
///
/// # Panics
///
/// Panics with a [`KernelError`] if sizes or types do not match, or if the result extends beyond the end of the buffer.
///
/// # Example
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_megatron_kernels::gemm::accumulate_weight_gradient_at;
///
/// let device = Device::flex();
/// let x = Tensor::<2>::ones([3, 1], &device);
/// let gradient = Tensor::full([3, 2], 2.0, &device);
/// let flat = accumulate_weight_gradient_at(x, gradient, Tensor::ones([4], &device), 1, true);
/// let values: Vec<f32> = flat.into_data().try_into_vec().unwrap();
/// assert_eq!(values, [1.0, 7.0, 7.0, 1.0]);
/// ```
pub fn accumulate_weight_gradient_at(
    x: Tensor<2>,
    gradient: Tensor<2>,
    flat: Tensor<1>,
    offset: usize,
    add: bool,
) -> Tensor<1> {
    accumulate_weight_gradient_at_by(None, x, gradient, flat, offset, add)
}

/// Computes [`accumulate_weight_gradient_at`] with the given BLAS library on the CPU. Other devices ignore the library.
///
/// # Panics
///
/// Panics in the same cases as [`accumulate_weight_gradient_at`].
pub fn accumulate_weight_gradient_at_by(
    blas: Option<Blas>,
    x: Tensor<2>,
    gradient: Tensor<2>,
    flat: Tensor<1>,
    offset: usize,
    add: bool,
) -> Tensor<1> {
    accept(check_accumulate_at(&x, &gradient, &flat, offset));
    weight_gradient(blas, x, gradient, flat, offset, add)
}

fn weight_gradient(
    blas: Option<Blas>,
    x: Tensor<2>,
    gradient: Tensor<2>,
    flat: Tensor<1>,
    offset: usize,
    add: bool,
) -> Tensor<1> {
    let inputs = vec![
        x.into_dispatch(),
        gradient.into_dispatch(),
        flat.into_dispatch(),
    ];
    let op = GemmOp::WeightGradient { offset, add, blas };
    Tensor::from_dispatch(launch_one(op, inputs))
}

/// Returns a description of the engine that multiplies matrices on a device by default. The description contains the
/// reason why no faster engine is used.
pub fn engine_of(device: &Device) -> String {
    describe(device.as_dispatch())
}

/// Returns the reason why a CUDA device uses Burn's matmul instead of cuBLASLt. Returns `None` if the device uses
/// cuBLASLt or is not a CUDA device.
pub fn slow_reason(device: &Device) -> Option<String> {
    match device.clone().inner().as_dispatch() {
        #[cfg(feature = "cubecl")]
        DispatchDevice::Cube(device) => cube::slow_reason(device),
        _ => None,
    }
}

fn describe(device: &DispatchDevice) -> String {
    match device {
        DispatchDevice::Autodiff(device) => describe(device),
        DispatchDevice::Flex(_) => cpu::NAME.to_string(),
        #[cfg(feature = "cubecl")]
        DispatchDevice::Cube(device) => cube::describe(device),
        #[allow(unreachable_patterns)]
        other => format!("none: this crate has no kernels for {other:?}"),
    }
}

fn check_linear(
    x: &Tensor<2>,
    weight: &Tensor<2>,
    bias: Option<&Tensor<1>>,
) -> Result<(), KernelError> {
    let operation = op::LINEAR;
    let ([rows, inputs], [expected, outputs]) = (x.dims(), weight.dims());
    let given = bias.map(|bias| bias.dims()[0]);
    let fits = inputs == expected && given.is_none_or(|given| given == outputs);
    check_shape(operation, fits, || {
        let bias = given.map_or("none".to_string(), |given| format!("[{given}]"));
        format!(
            "x is [{rows}, {inputs}], the weight [{expected}, {outputs}], the bias {bias}: expected \
             [rows, in], [in, out] and [out]"
        )
    })?;
    let dtype = x.dtype();
    check_same_type(operation, dtype, "type of the weight", weight.dtype())?;
    bias.map_or(Ok(()), |bias| {
        check_same_type(operation, dtype, "type of the bias", bias.dtype())
    })
}

fn check_accumulate(
    x: &Tensor<2>,
    gradient: &Tensor<2>,
    into: &Tensor<2>,
) -> Result<(), KernelError> {
    let operation = op::WEIGHT_GRADIENT;
    let ([rows, inputs], [others, outputs]) = (x.dims(), gradient.dims());
    let sizes = into.dims();
    let fits = rows == others && sizes == [inputs, outputs];
    check_shape(operation, fits, || {
        format!(
            "x is [{rows}, {inputs}], the gradient [{others}, {outputs}], the accumulator {sizes:?}: \
             expected [rows, in], [rows, out] and [in, out]"
        )
    })?;
    let name = "type of the accumulator";
    check_accumulated_types(operation, [x, gradient], name, into.dtype())
}

fn check_accumulate_at(
    x: &Tensor<2>,
    gradient: &Tensor<2>,
    flat: &Tensor<1>,
    offset: usize,
) -> Result<(), KernelError> {
    let operation = op::WEIGHT_GRADIENT_AT;
    let ([rows, inputs], [others, outputs]) = (x.dims(), gradient.dims());
    check_shape(operation, rows == others, || {
        format!(
            "x is [{rows}, {inputs}], the gradient [{others}, {outputs}]: expected [rows, in] and [rows, out]"
        )
    })?;
    check_range(operation, flat, offset, &[inputs, outputs])?;
    let name = "type of the flat buffer";
    check_accumulated_types(operation, [x, gradient], name, flat.dtype())
}

fn check_accumulated_types(
    operation: &'static str,
    [x, gradient]: [&Tensor<2>; 2],
    name: &'static str,
    into: DType,
) -> Result<(), KernelError> {
    let of_gradient = "type of the gradient";
    check_same_type(operation, x.dtype(), of_gradient, gradient.dtype())?;
    check_sum_type(operation, x.dtype(), name, into)
}
