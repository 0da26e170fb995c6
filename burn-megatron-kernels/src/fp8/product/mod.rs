//! Products of quantised matrices.
//!
//! The reference path decodes both factors to f32 and multiplies them in f32, or in f64 if the
//! result is. On CUDA, cuBLASLt multiplies the codes directly if the GPU and the library support
//! it, and agrees within the rounding of its sums:
//!
//! | scales | chip | library |
//! |---|---|---|
//! | one | compute capability 8.9 and later | cuBLASLt 12 |
//! | 1 x 128 and 128 x 128, not both factors 128 x 128 | 9.0 alone | cuBLASLt 12.9 |
//! | MXFP8 | 10.0 and later | cuBLASLt 12.8 |
//!
//! It also requires rows of both factors to be multiples of 16, and at least one factor in E4M3.
//! Other products are decoded, with one warning. [`engine_of_fp8`] describes the engine of a
//! device.

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

/// The accumulation of a product of 8-bit factors on a tensor core. The emulated path ignores it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Accumulation {
    /// In f32: the partial sums of the tensor core are added there every few steps. For gradients.
    #[default]
    Exact,
    /// In the accumulators of the tensor core throughout, which on Hopper have fewer bits than f32:
    /// faster. For outputs, as in Transformer Engine, and with one scale only; otherwise this is
    /// [`Exact`](Self::Exact).
    Fast,
}

/// `a b^T + bias`: `[m, depth]` and `[n, depth]` to `[m, n]` in `dtype`, one of f32, f16, bf16, and
/// on the CPU f64. Sums are computed in f32 (in f64 for a result in f64), the bias `[n]` of any
/// float type is added to them, and the result is rounded once.
///
/// Both factors may have any kind of scales and be E4M3 or E5M2. Any size may be 0; over a depth of 0
/// the sum is 0.
///
/// # Panics
///
/// With a [`KernelError`](crate::KernelError) for depths that differ, a bias of another size, codes
/// or scales that do not have the sizes that [`Fp8Matrix`] documents, matrices on different
/// devices, and a type that the device does not support.
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
    // Sums of the CPU are the exact ones.
    let _ = accumulation;
    emulated::multiply(a, b, bias, dtype.into())
}

/// `flat` with `a b^T`, row by row, over its elements from `offset` on, or added to them if `add`:
/// `[m, depth]` and `[n, depth]` go to `m n` elements of `flat`, `[length]` in f32, or in f64 on
/// the CPU. Written in place if `flat` is uniquely owned. Sums are computed in the type of `flat`,
/// exactly ([`Accumulation::Exact`]): this is for gradients of weights.
///
/// Any size may be 0; over a depth of 0 the product is 0. On CUDA the product goes straight into
/// the buffer where the range starts at a multiple of 16 bytes, elsewhere by way of a matrix of its
/// own.
///
/// # Panics
///
/// With a [`KernelError`](crate::KernelError) for depths that differ, a range that exceeds the
/// buffer, a buffer of another type, codes or scales that do not have the sizes that [`Fp8Matrix`]
/// documents, and tensors on different devices.
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

/// Describes the engine that multiplies 8-bit matrices on a device, and why it is not a faster one.
pub fn engine_of_fp8(device: &Device) -> String {
    engine::describe(device)
}

/// A product `[m, n]` in f32, written into the buffer or added there.
fn store_flat(product: Tensor<2>, flat: Tensor<1>, offset: usize, add: bool) -> Tensor<1> {
    let len = product.shape().num_elements();
    if len == 0 {
        // Burn's reshape reads a 0 as "keep this dimension".
        return flat;
    }
    let product = product.cast(wide(flat.dtype())).reshape([len]);
    flat::accumulate(flat, offset, product, add)
}
