//! Statistics of the quantization errors of a tensor, for reports.

use burn::tensor::{Bool, DType, FloatDType, Tensor};

use super::format::Format;
use super::matrix::{Fp8Matrix, Scales};
use super::quantize::{amax, dequantize};
use crate::KernelError;
use crate::error::{accept, check_shape};

const NAME: &str = "statistics";

/// Statistics of the quantization errors of a matrix.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Statistics {
    /// The largest magnitude of the values. It is NaN if a value is NaN, and 0 for an empty matrix.
    pub amax: f64,
    /// The fraction of values that saturate. A value saturates if its magnitude exceeds the largest value of the format
    /// times the scale.
    pub saturated: f64,
    /// The fraction of nonzero values that the quantization converted to zero.
    pub flushed: f64,
    /// The signal-to-noise ratio in decibels, `10 log10(sum x^2 / sum (x - quantized)^2)`. It is infinite if there are
    /// no errors, and NaN if a value is infinite or NaN.
    pub snr: f64,
}

/// The relative tolerance of the saturation limit, which is the largest value of the format times the scale. It allows
/// for two roundings of the scale.
const ROUNDING: f64 = 4.0 * f32::EPSILON as f64;

/// Computes the quantization errors of a matrix from its quantized copy.
///
/// `x` has the shape `[rows, depth]` of the copy. For a columnwise copy, pass the transposed matrix.
///
/// Use this function only for reports, because it is slow: it launches a dozen of Burn's operations and waits for the
/// result. Sums are computed in f32. For an empty matrix, the signal-to-noise ratio is infinite and all other values
/// are 0. NaN counts as neither saturated nor flushed to zero.
///
/// # Panics
///
/// Panics with a [`KernelError`] if the shape of `x` differs from the shape of the copy, and in the same cases as
/// [`dequantize`].
///
/// # Example
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_megatron_kernels::fp8::{Format, Scaling, QuantizerUsage, quantize, statistics};
///
/// let device = Device::flex();
/// let x = Tensor::<2>::from_floats([[1000.0, 1.0], [0.0005, 0.0]], &device);
/// let scaling = Scaling::Tensor(Tensor::ones([1], &device));
/// let copy = quantize(x.clone(), Format::E4M3, &scaling, QuantizerUsage::COLUMNWISE).columnwise;
/// let statistics = statistics(x.transpose(), &copy.unwrap());
/// assert_eq!(statistics.amax, 1000.0);
/// assert_eq!(statistics.saturated, 1.0 / 4.0);
/// assert_eq!(statistics.flushed, 1.0 / 3.0);
/// ```
pub fn statistics(x: Tensor<2>, matrix: &Fp8Matrix) -> Statistics {
    accept(matrix.check(NAME, "the matrix"));
    accept(check_sizes(x.dims(), matrix));
    let x = x.cast(FloatDType::F32);
    let count = x.shape().num_elements();
    let nothing = Statistics {
        amax: 0.0,
        saturated: 0.0,
        flushed: 0.0,
        snr: f64::INFINITY,
    };
    if count == 0 {
        return nothing;
    }
    let largest = number(amax(x.clone()));
    if largest == 0.0 {
        return nothing;
    }

    let (codes, scales) = codes_and_scales(matrix);
    let magnitude = x.clone().abs();
    let limit = scales.clone() * (f64::from(matrix.format.max()) * (1.0 + ROUNDING));
    let beyond = magnitude.clone().greater(limit);
    let nonzero = magnitude.greater_elem(0.0);
    let flushed = nonzero.clone().bool_and(codes.clone().equal_elem(0.0));
    // Squares are computed relative to the largest value, so that they cannot overflow.
    let noise = (x.clone() - codes * scales) / largest;
    let signal = x / largest;
    let total = |x: Tensor<2>| x.clone().mul(x).sum();
    let counted = |x: Tensor<2, Bool>| number(x.int().sum().float().cast(FloatDType::F32));
    let (signal, noise) = (number(total(signal)), number(total(noise)));
    Statistics {
        amax: largest,
        saturated: counted(beyond) / count as f64,
        flushed: counted(flushed) / counted(nonzero).max(1.0),
        snr: 10.0 * (signal / noise).log10(),
    }
}

/// Returns the values of the codes without their scales, and the scale of each code.
fn codes_and_scales(matrix: &Fp8Matrix) -> (Tensor<2>, Tensor<2>) {
    let device = matrix.codes.device();
    let one = match matrix.format {
        Format::E5M2 => 0x3c3c_3c3c_i64,
        _ => 0x3838_3838,
    };
    let codes = Fp8Matrix {
        scales: Scales::Tensor(Tensor::ones([1], (&device, DType::F32))),
        ..matrix.clone()
    };
    let scales = Fp8Matrix {
        codes: matrix.codes.full_like(one),
        ..matrix.clone()
    };
    (dequantize(&codes), dequantize(&scales))
}

fn number(x: Tensor<1>) -> f64 {
    f64::from(x.into_scalar::<f32>())
}

fn check_sizes([rows, depth]: [usize; 2], matrix: &Fp8Matrix) -> Result<(), KernelError> {
    let of_copy = [matrix.rows(), matrix.depth];
    check_shape(NAME, of_copy == [rows, depth], || {
        format!("x is [{rows}, {depth}] and its copy {of_copy:?}: expected the same size")
    })
}

#[cfg(test)]
mod tests;
