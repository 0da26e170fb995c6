//! The element types of the CPU implementations.

use std::fmt::Debug;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, Neg, Sub, SubAssign};

use burn::tensor::{bf16, f16};

use super::math;

/// A float type of tensor elements.
pub(crate) trait Element: burn::tensor::Element + bytemuck::Pod + Send + Sync {
    /// The type in which values are computed: f64 for f64, f32 for the other types.
    type Wide: Real;
    /// Converts the value exactly to the type [`Wide`](Self::Wide).
    fn wide(self) -> Self::Wide;
    /// Rounds a value to this type.
    fn narrow(value: Self::Wide) -> Self;
}

/// A float type in which the CPU implementations compute. Its functions have no branches, so that loops over them are
/// compiled to SIMD code.
pub(crate) trait Real:
    Element<Wide = Self>
    + Copy
    + Debug
    + PartialOrd
    + Sum
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + SubAssign
{
    const ZERO: Self;
    const ONE: Self;
    /// Negative infinity, which is below every finite value.
    const NEG_INFINITY: Self;

    /// Rounds an f64 to this type.
    fn of(value: f64) -> Self;
    /// Converts the value to f64.
    fn double(self) -> f64;
    /// Returns the larger value. If one value is NaN, returns the other value.
    fn larger(self, other: Self) -> Self;
    /// Returns the square root.
    fn root(self) -> Self;
    /// Returns `e^self` with an error of at most 2 units in the last place. The result underflows to 0 and overflows to
    /// infinity.
    fn exponential(self) -> Self;
    /// Returns the natural logarithm.
    fn logarithm(self) -> Self;
    /// Returns the absolute value.
    fn magnitude(self) -> Self;
    /// Returns whether the value is neither infinite nor NaN.
    fn finite(self) -> bool;
    /// Returns `self * factor + term`. If `FUSED` is true, the result is rounded once. Set `FUSED` only on processors
    /// with a fused instruction, because it would otherwise call a slow function.
    fn times_plus<const FUSED: bool>(self, factor: Self, term: Self) -> Self;
}

macro_rules! real {
    ($type:ident, $exp:path) => {
        impl Element for $type {
            type Wide = Self;
            #[inline(always)]
            fn wide(self) -> Self {
                self
            }
            #[inline(always)]
            fn narrow(value: Self) -> Self {
                value
            }
        }

        impl Real for $type {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const NEG_INFINITY: Self = $type::NEG_INFINITY;

            #[inline(always)]
            fn of(value: f64) -> Self {
                value as Self
            }
            #[inline(always)]
            fn double(self) -> f64 {
                f64::from(self)
            }
            #[inline(always)]
            fn larger(self, other: Self) -> Self {
                self.max(other)
            }
            #[inline(always)]
            fn root(self) -> Self {
                self.sqrt()
            }
            #[inline(always)]
            fn exponential(self) -> Self {
                $exp(self)
            }
            #[inline(always)]
            fn logarithm(self) -> Self {
                self.ln()
            }
            #[inline(always)]
            fn magnitude(self) -> Self {
                self.abs()
            }
            #[inline(always)]
            fn finite(self) -> bool {
                self.is_finite()
            }
            #[inline(always)]
            fn times_plus<const FUSED: bool>(self, factor: Self, term: Self) -> Self {
                if FUSED {
                    self.mul_add(factor, term)
                } else {
                    self * factor + term
                }
            }
        }
    };
}

real!(f32, math::exp);
real!(f64, f64::exp);

macro_rules! half {
    ($type:ident) => {
        impl Element for $type {
            type Wide = f32;
            #[inline(always)]
            fn wide(self) -> f32 {
                self.to_f32()
            }
            #[inline(always)]
            fn narrow(value: f32) -> Self {
                Self::from_f32(value)
            }
        }
    };
}

half!(f16);
half!(bf16);
