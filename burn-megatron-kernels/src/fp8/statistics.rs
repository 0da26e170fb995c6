//! What a quantiser did to a tensor, for reports.

use burn::tensor::{FloatDType, Tensor};

use super::{Fp8Matrix, dequantize};

/// How well a matrix came through.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Statistics {
    /// The largest magnitude.
    pub amax: f64,
    /// Share of the values whose magnitude times the scale is beyond the largest of the format.
    pub saturated: f64,
    /// Share of the nonzero values that became zero.
    pub flushed: f64,
    /// Signal to noise in decibels, `10 log10(sum x^2 / sum (x - quantised)^2)`; infinite where nothing was lost.
    pub snr: f64,
}

/// Compares a matrix with its rowwise copy.
pub fn statistics(x: Tensor<2>, rowwise: &Fp8Matrix) -> Statistics {
    let x = x.cast(FloatDType::F32);
    let quantised = dequantize(rowwise);
    let count = x.shape().num_elements().max(1) as f64;
    let number = |x: Tensor<1>| x.into_scalar::<f32>() as f64;
    let noise = number((x.clone() - quantised.clone()).powf_scalar(2.0).sum());
    let signal = number(x.clone().powf_scalar(2.0).sum());
    let magnitude = x.clone().abs();
    let beyond = magnitude
        .clone()
        .greater(quantised.clone().abs().max().unsqueeze());
    let nonzero = magnitude.clone().greater_elem(0.0);
    let zero = quantised.equal_elem(0.0);
    let flushed = nonzero.clone().bool_and(zero);
    let share = |x: Tensor<2, burn::tensor::Bool>| number(x.float().sum());
    Statistics {
        amax: number(magnitude.max()),
        saturated: share(beyond) / count,
        flushed: share(flushed) / share(nonzero).max(1.0),
        snr: 10.0 * (signal / noise).log10(),
    }
}
