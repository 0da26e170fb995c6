//! The nonlinearities and their derivatives for one value, with the same formulas as on the CPU.

use cubecl::prelude::*;

use crate::activation::cpu::curve::{
    GAUSSIAN_SCALE, QUICK_SCALE, TAIL, TAIL_SCALE, TANH_CUBIC, TANH_END, TANH_SCALE,
};
use crate::activation::kind::Curve;
use crate::activation::{Activation, FusedActivation};

/// The compile-time parameters of a kernel, in addition to the element type and the width.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ActivationVariant {
    pub curve: Curve,
    pub gated: bool,
    pub clamped: bool,
    /// Whether an offset is added to the second half of a gated input. An offset of 0 is not added, because the
    /// addition would change the sign of a zero.
    pub shifted: bool,
}

impl From<FusedActivation> for ActivationVariant {
    fn from(fused: FusedActivation) -> Self {
        Self {
            clamped: fused.options.clamp.is_some(),
            shifted: fused.options.offset != 0.0,
            ..Self::plain(fused.kind)
        }
    }
}

impl ActivationVariant {
    /// Creates a variant without clamp and offset.
    pub fn plain(kind: Activation) -> Self {
        Self {
            curve: kind.curve(),
            gated: kind.is_gated(),
            clamped: false,
            shifted: false,
        }
    }

    /// Returns the width of the input divided by the width of the output.
    pub fn halves(self) -> usize {
        if self.gated { 2 } else { 1 }
    }
}

/// Returns the value and the derivative of a nonlinearity.
#[cube]
pub(super) fn curve(x: f32, #[comptime] kind: Curve) -> (f32, f32) {
    match comptime!(kind) {
        Curve::Normal => normal(x),
        Curve::Tanh => {
            let end = comptime!(TANH_END as f32);
            let near = bounded(x, end);
            let square = near * near * comptime!(TANH_CUBIC as f32);
            let scale = comptime!(TANH_SCALE as f32);
            let inner = near * (1.0f32 + square) * scale;
            logistic(x, inner, (1.0f32 + square * 3.0f32) * scale)
        }
        Curve::Quick => {
            let scale = comptime!(QUICK_SCALE as f32);
            logistic(x, x * scale, f32::new(scale))
        }
        Curve::Silu => logistic(x, x, f32::new(1.0)),
        Curve::SquaredRelu => {
            let positive = select(x < 0.0f32, 0.0f32, x);
            (positive * positive, positive + positive)
        }
    }
}

/// Returns `1 / x` for `x` from 1 to a few thousand, with an error of one or two units in the last place. A division
/// would call a function that also handles numbers whose reciprocal is not a normal number. This call would cost
/// registers.
#[cube]
fn reciprocal(x: f32) -> f32 {
    let root = x.inverse_sqrt();
    let y = root * root;
    y + y * (1.0f32 - x * y)
}

/// The absolute value of `x` above which the tail is 0.
const TAIL_CUTOFF: f32 = 64.0;

/// Returns `x Phi(x)` and its derivative, using the coefficients of [`TAIL`].
#[cube]
fn normal(x: f32) -> (f32, f32) {
    let bell = (x * x * -0.5f32).exp();
    let t = reciprocal(1.0f32 + min(x.abs(), TAIL_CUTOFF) * TAIL_SCALE);
    let mut p = f32::new(comptime!(TAIL[0]));
    #[unroll]
    for i in 1..9usize {
        p = p * t + comptime!(TAIL[i]);
    }
    let tail = bell * t * p;
    let below = select(x < 0.0f32, tail, 1.0f32 - tail);
    (
        x * below,
        below + x * bell * comptime!(GAUSSIAN_SCALE as f32),
    )
}

/// Returns `x s` and its derivative for `s = sigmoid(inner)`. The argument of the exponential is negative, so that it
/// overflows on no device.
#[cube]
fn logistic(x: f32, inner: f32, slope: f32) -> (f32, f32) {
    let e = (-inner.abs()).exp();
    let larger = reciprocal(1.0f32 + e);
    let smaller = e * larger;
    let s = select(inner < 0.0f32, smaller, larger);
    (x * s, s + x * slope * smaller * larger)
}

/// Clamps `x` to `-end..=end`. NaN stays NaN.
#[cube]
fn bounded(x: f32, end: f32) -> f32 {
    let x = select(x > end, end, x);
    select(x < -end, -end, x)
}

/// Returns the clamped first half of a gated input.
#[cube]
fn first_bounded(a: f32, clamp: f32, #[comptime] variant: ActivationVariant) -> f32 {
    if comptime!(variant.clamped) {
        select(a > clamp, clamp, a)
    } else {
        a
    }
}

/// Returns the clamped second half of a gated input, plus the offset.
#[cube]
fn second_factor(b: f32, clamp: f32, offset: f32, #[comptime] variant: ActivationVariant) -> f32 {
    let mut factor = b;
    if comptime!(variant.clamped) {
        factor = bounded(factor, clamp);
    }
    if comptime!(variant.shifted) {
        factor += offset;
    }
    factor
}

/// Returns the output from the halves `a` and `b`. An activation without a gate ignores `b`.
#[cube]
pub(crate) fn output<N: Size>(
    a: Vector<f32, N>,
    b: Vector<f32, N>,
    clamp: f32,
    offset: f32,
    #[comptime] variant: ActivationVariant,
) -> Vector<f32, N> {
    let mut y = Vector::<f32, N>::new(0.0);
    #[unroll]
    for i in 0..N::value() {
        let (value, _) = curve(first_bounded(a.extract(i), clamp, variant), variant.curve);
        if comptime!(variant.gated) {
            y.insert(
                i,
                value * second_factor(b.extract(i), clamp, offset, variant),
            );
        } else {
            y.insert(i, value);
        }
    }
    y
}

/// Returns the gradients of `a`, `b` and the row weight, given the gradient `g` of the output.
///
/// The gradient of the row weight has one partial sum per lane.
#[cube]
pub(super) fn gradients<N: Size>(
    a: Vector<f32, N>,
    b: Vector<f32, N>,
    g: Vector<f32, N>,
    weight: f32,
    clamp: f32,
    offset: f32,
    #[comptime] variant: ActivationVariant,
) -> (Vector<f32, N>, Vector<f32, N>, Vector<f32, N>) {
    let mut da = Vector::<f32, N>::new(0.0);
    let mut db = Vector::<f32, N>::new(0.0);
    let mut dweight = Vector::<f32, N>::new(0.0);
    #[unroll]
    for i in 0..N::value() {
        let first = a.extract(i);
        let upstream = g.extract(i) * weight;
        let (value, slope) = curve(first_bounded(first, clamp, variant), variant.curve);
        if comptime!(variant.gated) {
            let second = b.extract(i);
            let factor = second_factor(second, clamp, offset, variant);
            let mut first_gradient = upstream * factor * slope;
            let mut second_gradient = upstream * value;
            if comptime!(variant.clamped) {
                first_gradient = select(first > clamp, 0.0f32, first_gradient);
                second_gradient = select(second.abs() > clamp, 0.0f32, second_gradient);
            }
            da.insert(i, first_gradient);
            db.insert(i, second_gradient);
            dweight.insert(i, g.extract(i) * value * factor);
        } else {
            da.insert(i, upstream * slope);
            dweight.insert(i, g.extract(i) * value);
        }
    }
    (da, db, dweight)
}
