//! The element types of the CPU implementations.

use std::fmt::Debug;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, Neg, Sub, SubAssign};

use burn::tensor::{bf16, f16};

use super::math;

/// A float that tensors hold.
pub(crate) trait Element: burn::tensor::Element + bytemuck::Pod + Send + Sync {
    /// The type in which its values are computed: f64 for f64, f32 for the others.
    type Wide: Real;
    /// The value, exactly.
    fn wide(self) -> Self::Wide;
    /// The nearest value of this type.
    fn narrow(value: Self::Wide) -> Self;
}

/// A float that the CPU implementations compute in. The functions have no branches, so that loops
/// over them become SIMD code.
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
    /// 0.
    const ZERO: Self;
    /// 1.
    const ONE: Self;
    /// The smallest value, below every finite one.
    const NEG_INFINITY: Self;

    /// The nearest value.
    fn of(value: f64) -> Self;
    /// The same value as f64.
    fn double(self) -> f64;
    /// The larger; the other one if one is NaN.
    fn larger(self, other: Self) -> Self;
    /// The square root.
    fn root(self) -> Self;
    /// `e^self`, within 2 units in the last place; 0 far below, infinity far above.
    fn exponential(self) -> Self;
    /// The natural logarithm.
    fn logarithm(self) -> Self;
    /// The absolute value.
    fn magnitude(self) -> Self;
    /// Neither infinite nor NaN.
    fn finite(self) -> bool;
    /// `self * factor + term`, rounded once if `FUSED`; where the processor has no such instruction that would be a
    /// call.
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
