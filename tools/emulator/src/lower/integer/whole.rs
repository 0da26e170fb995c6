//! Integers by type.

/// Returns whether a type is an integer type with arithmetic.
pub fn is(of: &str) -> bool {
    matches!(of, "u16" | "s16" | "u32" | "s32" | "u64" | "s64")
}

/// An integer as stored in a register. The bits above its width are zero.
pub trait Whole: Copy + Ord + Send + Sync + 'static {
    const BITS: u32;
    fn of(bits: u64) -> Self;
    fn bits(self) -> u64;
    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    /// Returns the upper half of the product.
    fn high(self, other: Self) -> Self;
    /// Returns the product with twice the bits, up to 64.
    fn wide(self, other: Self) -> u64;
    /// Returns the quotient. It is all ones if the divisor is zero, as on GPUs. PTX does not specify this case.
    fn div(self, other: Self) -> Self;
    /// Returns the remainder. It is all ones if the divisor is zero.
    fn rem(self, other: Self) -> Self;
    /// Returns the absolute difference.
    fn distance(self, other: Self) -> Self;
    fn abs(self) -> Self;
    fn shr(self, by: u32) -> Self;
}

macro_rules! whole {
    ($type:ident, $unsigned:ident, $double:ident, $abs:expr) => {
        impl Whole for $type {
            const BITS: u32 = $type::BITS;

            #[inline(always)]
            fn of(bits: u64) -> Self {
                bits as Self
            }

            #[inline(always)]
            fn bits(self) -> u64 {
                u64::from(self as $unsigned)
            }

            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }

            #[inline(always)]
            fn sub(self, other: Self) -> Self {
                self.wrapping_sub(other)
            }

            #[inline(always)]
            fn mul(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }

            #[inline(always)]
            fn high(self, other: Self) -> Self {
                ((self as $double).wrapping_mul(other as $double) >> Self::BITS) as Self
            }

            #[inline(always)]
            fn wide(self, other: Self) -> u64 {
                let product = (self as $double).wrapping_mul(other as $double);
                product as u64 & (u64::MAX >> 64u32.saturating_sub(2 * Self::BITS))
            }

            #[inline(always)]
            fn div(self, other: Self) -> Self {
                match other {
                    0 => !0,
                    _ => self.wrapping_div(other),
                }
            }

            #[inline(always)]
            fn rem(self, other: Self) -> Self {
                match other {
                    0 => !0,
                    _ => self.wrapping_rem(other),
                }
            }

            #[inline(always)]
            fn distance(self, other: Self) -> Self {
                self.max(other).wrapping_sub(self.min(other))
            }

            #[inline(always)]
            fn abs(self) -> Self {
                let abs: fn(Self) -> Self = $abs;
                abs(self)
            }

            #[inline(always)]
            fn shr(self, by: u32) -> Self {
                if by < Self::BITS {
                    self >> by
                } else {
                    // Two shifts, so that the sign is kept.
                    self >> (Self::BITS - 1) >> 1
                }
            }
        }
    };
}

whole!(u16, u16, u32, |number| number);
whole!(i16, u16, i32, i16::wrapping_abs);
whole!(u32, u32, u64, |number| number);
whole!(i32, u32, i64, i32::wrapping_abs);
whole!(u64, u64, u128, |number| number);
whole!(i64, u64, i128, i64::wrapping_abs);

/// Evaluates `$made` with `$type` as the type named `$of`.
macro_rules! by_type {
    ($of:expr, $type:ident => $made:expr) => {
        match $of {
            "u16" | "b16" => {
                type $type = u16;
                $made
            }
            "s16" => {
                type $type = i16;
                $made
            }
            "u32" | "b32" => {
                type $type = u32;
                $made
            }
            "s32" => {
                type $type = i32;
                $made
            }
            "u64" | "b64" => {
                type $type = u64;
                $made
            }
            "s64" => {
                type $type = i64;
                $made
            }
            other => return Err(format!("unsupported type .{other}")),
        }
    };
}

pub(super) use by_type;
