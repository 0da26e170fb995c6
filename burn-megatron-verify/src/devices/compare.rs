//! Computes differences of tensors, and the bounds on differences that rounding errors can cause.

use burn::tensor::{DType, Device};

/// The lower bound of the scale of a sum, as a share of the sum of the absolute values of its terms. Sums can cancel to
/// zero in exact arithmetic. The computed value of such a sum is rounding noise, whose size depends on the terms.
pub(super) const CANCELLED: f64 = 0.1;

/// The error bounds of a device.
///
/// The bound of a single operation is two roundings of its output plus 16 `sqrt(n)` unit roundoffs of f32. `n` is the
/// number of terms of the longest sum that the operation can contain. `sqrt(n)` is the standard deviation of `n`
/// roundings, and the factor 16 includes a margin for approximated functions. Sums of 16-bit values are expected to be
/// accumulated in f32.
#[derive(Clone, Copy, Debug)]
pub(super) struct Units {
    margin: f64,
    /// The unit roundoff of the operands of matrix multiplications, if the device rounds them.
    factors: Option<f64>,
}

impl Units {
    pub fn of(device: &Device, margin: f64) -> Self {
        // On CUDA, Burn rounds the operands of f32 matrix multiplications to TF32.
        let is_cuda = format!("{device:?}").contains("Cuda");
        Self {
            margin,
            factors: is_cuda.then_some(2f64.powi(-11)),
        }
    }

    /// Returns the bound of one operation that contains sums of `n` terms and has an output of this dtype.
    pub fn operation(&self, n: usize, output: DType, is_product: bool) -> f64 {
        let sums = 16.0 * 2f64.powi(-24) * (n as f64).sqrt();
        let factors = self.factors.filter(|_| is_product).unwrap_or_default();
        self.margin * (2.0 * unit(output) + sums + 4.0 * factors)
    }

    /// Returns the bound of a sequence of `operations` operations.
    pub fn row(&self, operations: usize, scale: &Scale) -> f64 {
        let factors = self.factors.filter(|_| scale.has_products);
        let unit = unit(scale.narrowest).max(factors.unwrap_or_default());
        self.margin * 2.0 * ((operations * scale.longest_sum) as f64).sqrt() * unit
    }
}

/// The properties of a sequence of operations on which its rounding error depends.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scale {
    /// The largest number of values that one operation adds.
    pub longest_sum: usize,
    /// The narrowest float dtype.
    pub narrowest: DType,
    pub has_products: bool,
}

/// Returns the unit roundoff of a dtype.
fn unit(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 2f64.powi(-53),
        DType::F16 => 2f64.powi(-11),
        DType::BF16 => 2f64.powi(-8),
        _ => 2f64.powi(-24),
    }
}

/// Returns the largest difference of two elements, divided by the largest finite element of the reference or by
/// `scale`, whichever is larger.
///
/// Returns infinity if the lengths differ. Also returns infinity if an element is NaN or infinite, unless both elements
/// are equal.
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

/// Returns the largest absolute value. NaN is ignored.
pub(super) fn largest(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |most, x| most.max(x.abs()))
}
