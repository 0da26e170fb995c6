//! Differences, and what rounding explains of them.

use burn::tensor::{DType, Device};

/// A scale is at least this share of a magnitude. Sums can cancel to zero in exact arithmetic. The computed value of such a
/// sum is rounding noise, whose size follows from the terms.
pub(super) const CANCELLED: f64 = 0.1;

/// The bounds of a device.
///
/// Of one operation alone: two roundings of its output, and 16 `sqrt(n)` of f32, where `n` is the longest sum it can have: the
/// standard deviation of `n` roundings, and a margin for approximations of functions. Sums of 16-bit values are expected in f32.
#[derive(Clone, Copy, Debug)]
pub(super) struct Units {
    margin: f64,
    /// The unit roundoff of factors of products.
    factors: Option<f64>,
}

impl Units {
    pub fn of(device: &Device, margin: f64) -> Self {
        // Burn multiplies f32 there with the factors in TF32.
        let is_cuda = format!("{device:?}").contains("Cuda");
        Self {
            margin,
            factors: is_cuda.then_some(2f64.powi(-11)),
        }
    }

    /// Of an operation with sums of `n` and an output of this type.
    pub fn operation(&self, n: usize, output: DType, is_product: bool) -> f64 {
        let sums = 16.0 * 2f64.powi(-24) * (n as f64).sqrt();
        let factors = self.factors.filter(|_| is_product).unwrap_or_default();
        self.margin * (2.0 * unit(output) + sums + 4.0 * factors)
    }

    /// Of this many operations in a row.
    pub fn row(&self, operations: usize, scale: &Scale) -> f64 {
        let factors = self.factors.filter(|_| scale.has_products);
        let unit = unit(scale.narrowest).max(factors.unwrap_or_default());
        self.margin * 2.0 * ((operations * scale.longest_sum) as f64).sqrt() * unit
    }
}

/// The properties on which the rounding of several operations depends.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scale {
    /// The most values that one adds.
    pub longest_sum: usize,
    /// The narrowest type of floats.
    pub narrowest: DType,
    pub has_products: bool,
}

/// The unit roundoff of a type.
fn unit(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 2f64.powi(-53),
        DType::F16 => 2f64.powi(-11),
        DType::BF16 => 2f64.powi(-8),
        _ => 2f64.powi(-24),
    }
}

/// The largest difference of two elements over the largest finite element of the reference, or over `scale` if that is larger;
/// infinite if one is not a number, or infinite, and the other is not the same.
pub fn difference(expected: &[f64], found: &[f64], scale: f64) -> f64 {
    if expected.len() != found.len() {
        return f64::INFINITY;
    }
    let finite = expected.iter().filter(|x| x.is_finite());
    let scale = finite.fold(scale, |most, x| most.max(x.abs()));
    let apart = expected.iter().zip(found).map(|(a, b)| match a == b {
        true => 0.0,
        false if a.is_finite() && b.is_finite() => (a - b).abs(),
        false => f64::INFINITY,
    });
    match apart.fold(0.0, f64::max) {
        0.0 => 0.0,
        apart => apart / scale,
    }
}

/// The largest absolute value; NaN counts as none.
pub(super) fn largest(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |most, x| most.max(x.abs()))
}
