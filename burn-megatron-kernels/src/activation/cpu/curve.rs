//! The nonlinearities and their derivatives. They have no branches, so that loops over them are vectorized.

use crate::cpu::Real;

/// A float type that can compute the tail of the normal distribution function.
pub(in crate::activation) trait Gaussian: Real {
    /// Returns `e^(-x^2 / 2)` and `Phi(-|x|)`.
    fn tail(self) -> (Self, Self);
}

impl Gaussian for f64 {
    #[inline(always)]
    fn tail(self) -> (f64, f64) {
        let far = 0.5 * libm::erfc(self.abs() * std::f64::consts::FRAC_1_SQRT_2);
        ((-0.5 * self * self).exp(), far)
    }
}

/// Coefficients of the polynomial `P` in `Phi(-x) e^(x^2 / 2) = t P(t)` with `t = 1 / (1 + 0.35 x)`, highest power
/// first. The polynomial interpolates on `0 <= x <= 14.5`, where the tail becomes 0 in f32. Its error is at most 4e-8.
pub(crate) const TAIL: [f32; 9] = [
    -0.029_732_276,
    0.146_784,
    -0.261_410_54,
    0.165_510_17,
    -0.027_321_91,
    0.107_212_5,
    0.119_425_09,
    0.139_914_33,
    0.139_618_64,
];

/// The factor of `x` in the definition of `t`. See [`TAIL`].
pub(crate) const TAIL_SCALE: f32 = 0.35;

impl Gaussian for f32 {
    #[inline(always)]
    fn tail(self) -> (f32, f32) {
        let bell = (-0.5 * self * self).exponential();
        let t = 1.0 / (1.0 + TAIL_SCALE * self.abs());
        let mut p = TAIL[0];
        for coefficient in &TAIL[1..] {
            p = p * t + coefficient;
        }
        (bell, bell * t * p)
    }
}

/// A nonlinearity that computes its value and its derivative at `x`.
pub(super) trait Nonlinear {
    fn at<R: Gaussian>(x: R) -> (R, R);
}

/// GELU: `x Phi(x)`.
pub(super) struct Normal;
/// The tanh approximation of GELU: `x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3))`, because `0.5 (1 + tanh(u))` is
/// `sigmoid(2 u)`.
pub(super) struct Tanh;
/// The sigmoid approximation of GELU: `x sigmoid(1.702 x)`.
pub(super) struct Quick;
/// SiLU: `x sigmoid(x)`.
pub(super) struct Silu;
/// Squared ReLU: `max(x, 0)^2`.
pub(super) struct SquaredRelu;

/// The constant `2 sqrt(2 / pi)`.
pub(crate) const TANH_SCALE: f64 = 1.595_769_121_605_730_7;
/// The coefficient of `x^3` in [`Tanh`].
pub(crate) const TANH_CUBIC: f64 = 0.044_715;
/// The absolute value of the argument above which the sigmoid of [`Tanh`] is 0 or 1 in f64. The argument is clamped to
/// this value, because for larger arguments the cube would overflow, and the cube times a derivative of 0 would be NaN.
pub(crate) const TANH_END: f64 = 24.0;
/// The factor of `x` in [`Quick`].
pub(crate) const QUICK_SCALE: f64 = 1.702;
/// The constant `1 / sqrt(2 pi)`.
pub(crate) const GAUSSIAN_SCALE: f64 = 0.398_942_280_401_432_7;

impl Nonlinear for Normal {
    #[inline(always)]
    fn at<R: Gaussian>(x: R) -> (R, R) {
        let (bell, tail) = x.tail();
        let below = if x < R::ZERO { tail } else { R::ONE - tail };
        (x * below, below + x * bell * R::of(GAUSSIAN_SCALE))
    }
}

impl Nonlinear for Tanh {
    #[inline(always)]
    fn at<R: Gaussian>(x: R) -> (R, R) {
        let end = R::of(TANH_END);
        let near = bounded(x, -end, end);
        let square = near * near * R::of(TANH_CUBIC);
        let scale = R::of(TANH_SCALE);
        let inner = scale * near * (R::ONE + square);
        logistic(x, inner, scale * (R::ONE + R::of(3.0) * square))
    }
}

impl Nonlinear for Quick {
    #[inline(always)]
    fn at<R: Gaussian>(x: R) -> (R, R) {
        let scale = R::of(QUICK_SCALE);
        logistic(x, scale * x, scale)
    }
}

impl Nonlinear for Silu {
    #[inline(always)]
    fn at<R: Gaussian>(x: R) -> (R, R) {
        logistic(x, x, R::ONE)
    }
}

impl Nonlinear for SquaredRelu {
    #[inline(always)]
    fn at<R: Gaussian>(x: R) -> (R, R) {
        let positive = if x < R::ZERO { R::ZERO } else { x };
        (positive * positive, positive + positive)
    }
}

/// Returns `x s` and its derivative `s + x s (1 - s) u'` for `s = sigmoid(u)`.
///
/// The exponential `e = e^-|u|` never overflows. The derivative of the sigmoid is computed as
/// `s (1 - s) = e / (1 + e)^2`, which loses no digits.
#[inline(always)]
fn logistic<R: Gaussian>(x: R, inner: R, slope: R) -> (R, R) {
    let e = (-inner.magnitude()).exponential();
    let larger = R::ONE / (R::ONE + e);
    let smaller = e * larger;
    let s = if inner < R::ZERO { smaller } else { larger };
    (x * s, s + x * slope * smaller * larger)
}

/// Clamps `x` to the bounds. NaN stays NaN.
#[inline(always)]
pub(super) fn bounded<R: Real>(x: R, least: R, most: R) -> R {
    let x = if x > most { most } else { x };
    if x < least { least } else { x }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tail_keeps_its_digits_as_far_as_f32_has_them() {
        for i in -13_000..13_000 {
            let x = i as f32 * 0.001;
            let exact = 0.5 * libm::erfc(f64::from(x.abs()) * std::f64::consts::FRAC_1_SQRT_2);
            let relative = (f64::from(x.tail().1) - exact).abs() / exact;
            // The exponential of a rounded x^2 / 2 loses up to x^2 / 2 units in the last place.
            let bound = f64::from(f32::EPSILON) * (4.0 + 0.5 * f64::from(x * x));
            assert!(relative < bound, "{x}: {relative:e}");
        }
        for x in [20.0f32, 1e4, -1e4, f32::MAX] {
            assert_eq!(x.tail(), (0.0, 0.0));
        }
        assert!(f32::NAN.tail().1.is_nan() && f64::NAN.tail().1.is_nan());
    }

    fn check<S: Nonlinear>(name: &str) {
        for i in -40_000..40_000 {
            let x = i as f32 * 0.001;
            let (value, slope) = S::at(x);
            let (exact, exact_slope) = S::at(f64::from(x));
            let bound = 4e-7 * (1.0 + exact.abs());
            assert!(
                (f64::from(value) - exact).abs() < bound,
                "{name} at {x}: {value} for {exact}"
            );
            let bound = 1e-6 * (1.0 + exact_slope.abs());
            let error = (f64::from(slope) - exact_slope).abs();
            assert!(
                error < bound,
                "slope of {name} at {x}: {slope} for {exact_slope}"
            );
        }
        for x in [1e4f32, 65504.0, 1e18] {
            let (value, slope) = S::at(-x);
            assert!(
                value.abs() == 0.0 && slope.abs() == 0.0,
                "{name} at -{x}: {value}, {slope}"
            );
            let (value, slope) = S::at(x);
            let (exact, exact_slope) = S::at(f64::from(x));
            assert!(
                (f64::from(value) / exact - 1.0).abs() < 1e-6,
                "{name} at {x}: {value}"
            );
            assert!(
                (f64::from(slope) / exact_slope - 1.0).abs() < 1e-6,
                "{name} at {x}: {slope}"
            );
        }
        let (value, slope) = S::at(f32::NAN);
        assert!(value.is_nan() && slope.is_nan(), "{name} of NaN");
    }

    #[test]
    fn values_and_slopes_in_f32_are_those_in_f64_and_stay_finite() {
        check::<Normal>("gelu");
        check::<Tanh>("tanh gelu");
        check::<Quick>("quick gelu");
        check::<Silu>("silu");
        check::<SquaredRelu>("squared relu");
    }
}
