//! Multiplication of quantized matrices.
//!
//! The reference implementation decodes both operands to f32 and multiplies them in f32, or in f64 if the result is
//! f64. On CUDA, cuBLASLt multiplies the codes directly if the GPU and the library support it. The results of both
//! implementations differ only by the rounding of the sums.
//!
//! | scales | compute capability | library |
//! |---|---|---|
//! | single | 8.9 and later | cuBLASLt 12 |
//! | 1 x 128 and 128 x 128, not both operands 128 x 128 | 9.0 only | cuBLASLt 12.9 |
//! | MXFP8 | 10.0 and later | cuBLASLt 12.8 |
//!
//! cuBLASLt also requires that the numbers of rows of both operands are multiples of 16, and that at least one operand
//! is E4M3. If the operands do not meet these requirements, the reference implementation is used and a warning is
//! logged once. [`engine_of_fp8`] returns a description of the implementation that a device uses.

use burn::tensor::{Device, FloatDType, Tensor};

use super::matrix::Fp8Matrix;
use crate::cpu::wide;
use crate::error::accept;
use crate::flat;

mod check;
#[cfg(feature = "cuda")]
mod cuda;
mod emulated;
mod engine;
#[cfg(any(test, feature = "cuda"))]
mod problem;
pub(crate) mod scales;
#[cfg(test)]
mod tests;

pub use scales::library_scales;

/// The precision in which tensor cores accumulate the sums of an FP8 matrix multiplication. The reference
/// implementation, which decodes the operands, ignores it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Accumulation {
    /// The partial sums of the tensor core are added to a sum in f32 at short intervals. This is used for gradients.
    #[default]
    Exact,
    /// The sums stay in the accumulators of the tensor core. This is faster, but on Hopper these accumulators have
    /// fewer bits than f32. It is used for the outputs of layers, as in Transformer Engine. It requires a single scale
    /// per operand. With other scales, the multiplication uses [`Exact`](Self::Exact).
    Fast,
}

/// Computes `a b^T + bias` for FP8 matrices `a` and `b`.
///
/// - `a`: `[m, depth]`.
/// - `b`: `[n, depth]`.
/// - `bias`: `[n]` of any float type.
/// - returns `[m, n]` in `dtype`, which is f32, f16, bf16 or, on the CPU, f64.
///
/// Sums are computed in f32 (f64 if `dtype` is f64). The bias is added before the result is rounded once.
///
/// Each operand may have any kind of [`Scales`](super::Scales), and may be E4M3 or E5M2. Any size may be 0. If `depth`
/// is 0, the product `a b^T` is 0.
///
/// # Panics
///
/// Panics with a [`KernelError`](crate::KernelError) if
/// - the operands differ in `depth`, or the bias has a wrong size,
/// - the sizes of codes or scales differ from the sizes documented for [`Fp8Matrix`],
/// - the matrices are on different devices,
/// - the device does not support `dtype` or the type of the bias.
///
/// # Example
///
/// ```
/// use burn::tensor::{Device, FloatDType, Tensor};
/// use burn_megatron_kernels::fp8::{Accumulation, Format, Scaling, QuantizerUsage, multiply, quantize};
///
/// let device = Device::flex();
/// let x = Tensor::<2>::from_data([[1.0, -2.0, 0.5], [3.0, 0.0, 1.5]], &device);
/// let weight = Tensor::<2>::from_data([[1.0, 2.0], [0.5, 4.0], [2.0, -1.0]], &device);
/// let x = quantize(x, Format::E4M3, &Scaling::Mx, QuantizerUsage::ROWWISE);
/// let weight = quantize(weight, Format::E4M3, &Scaling::Mx, QuantizerUsage::COLUMNWISE);
/// let (x, weight) = (x.rowwise.unwrap(), weight.columnwise.unwrap());
/// let y = multiply(&x, &weight, None, FloatDType::F32, Accumulation::Fast);
/// let values: Vec<f32> = y.into_data().try_into_vec().unwrap();
/// assert_eq!(values, [1.0, -6.5, 6.0, 4.5]);
/// ```
pub fn multiply(
    a: &Fp8Matrix,
    b: &Fp8Matrix,
    bias: Option<Tensor<1>>,
    dtype: FloatDType,
    accumulation: Accumulation,
) -> Tensor<2> {
    accept(check::multiply(a, b, bias.as_ref(), dtype));
    #[cfg(feature = "cuda")]
    if let Some(product) = cuda::multiply(a, b, bias.as_ref(), dtype, accumulation) {
        return product;
    }
    // The emulated path ignores the accumulation.
    let _ = accumulation;
    emulated::multiply(a, b, bias, dtype.into())
}

/// Computes `a b^T` for FP8 matrices and writes it, row by row, to `flat`, starting at element `offset`. If `add` is
/// true, adds the result to the existing elements.
///
/// - `a`: `[m, depth]`.
/// - `b`: `[n, depth]`.
/// - `flat`: `[length]` in f32, or in f64 on the CPU. It is updated in place if no other tensor shares its memory. The
///   result has `m n` elements.
///
/// Use this function to accumulate weight gradients. Sums are computed in the type of `flat` with
/// [`Accumulation::Exact`].
///
/// Any size may be 0. If `depth` is 0, the product is 0. On CUDA, the result is written directly to the buffer if
/// `offset` is a multiple of 4 elements (16 bytes). Otherwise the result is first written to a temporary matrix.
///
/// # Panics
///
/// Panics with a [`KernelError`](crate::KernelError) if
/// - the operands differ in `depth`,
/// - the result extends beyond the end of the buffer, or the buffer has a wrong type,
/// - the sizes of codes or scales differ from the sizes documented for [`Fp8Matrix`],
/// - the tensors are on different devices.
///
/// # Example
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_megatron_kernels::fp8::{Format, Scaling, QuantizerUsage, accumulate_at, quantize};
///
/// let device = Device::flex();
/// let columnwise = |x| quantize(x, Format::E4M3, &Scaling::Mx, QuantizerUsage::COLUMNWISE).columnwise;
/// let x = columnwise(Tensor::<2>::from_data([[1.0], [2.0]], &device)).unwrap();
/// let gradient = columnwise(Tensor::<2>::from_data([[3.0, 0.5], [-1.0, 2.0]], &device)).unwrap();
/// let flat = accumulate_at(&x, &gradient, Tensor::ones([4], &device), 1, true);
/// let values: Vec<f32> = flat.into_data().try_into_vec().unwrap();
/// assert_eq!(values, [1.0, 2.0, 5.5, 1.0]);
/// ```
pub fn accumulate_at(
    a: &Fp8Matrix,
    b: &Fp8Matrix,
    flat: Tensor<1>,
    offset: usize,
    add: bool,
) -> Tensor<1> {
    accept(check::accumulate_at(a, b, &flat, offset));
    #[cfg(feature = "cuda")]
    if let Some(problem) = cuda::flat_problem(a, b, &flat, offset, add) {
        return cuda::accumulate_at(problem, a, b, flat, offset, add);
    }
    emulated::accumulate_at(a, b, flat, offset, add)
}

/// Returns a description of the engine that multiplies FP8 matrices on a device. The description contains the reason
/// why no faster engine is used.
pub fn engine_of_fp8(device: &Device) -> String {
    engine::describe(device)
}

/// Writes a matrix `[m, n]` in f32 to the buffer, or adds it to the buffer.
fn store_flat(product: Tensor<2>, flat: Tensor<1>, offset: usize, add: bool) -> Tensor<1> {
    let len = product.shape().num_elements();
    if len == 0 {
        // Burn's reshape interprets a 0 as "keep this dimension".
        return flat;
    }
    let product = product.cast(wide(flat.dtype())).reshape([len]);
    flat::accumulate(flat, offset, product, add)
}
