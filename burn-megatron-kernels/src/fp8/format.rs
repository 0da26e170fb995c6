//! The 8-bit and 4-bit floating-point formats, and the conversion of single values.
//!
//! E4M3 and E5M2 are defined by Micikevicius et al. 2022, arXiv:2209.05433. E2M1 and E8M0 are defined by the OCP
//! Microscaling Formats (MX) Specification 1.0. All conversions use integer operations on bits, so that every device
//! computes the same results.

/// A floating-point format of 8 or 4 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// 4 exponent bits and 3 mantissa bits. The largest value is 448. The format has one NaN and no infinity.
    E4M3,
    /// 5 exponent bits and 2 mantissa bits. The largest value is 57 344. The format has infinities and NaN.
    E5M2,
    /// 2 exponent bits and 1 mantissa bit. The values are 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. The format
    /// has no infinity and no NaN.
    E2M1,
}

impl Format {
    /// Returns the largest finite value.
    pub const fn max(self) -> f32 {
        match self {
            Self::E4M3 => 448.0,
            Self::E5M2 => 57_344.0,
            Self::E2M1 => 6.0,
        }
    }

    /// Returns the smallest positive value.
    pub const fn min_positive(self) -> f32 {
        match self {
            Self::E4M3 => 1.0 / 512.0,
            Self::E5M2 => 1.0 / 65_536.0,
            Self::E2M1 => 0.5,
        }
    }

    /// Returns the number of mantissa bits.
    pub const fn mantissa_bits(self) -> u32 {
        match self {
            Self::E4M3 => 3,
            Self::E5M2 => 2,
            Self::E2M1 => 1,
        }
    }

    /// Returns the exponent bias.
    pub const fn bias(self) -> u32 {
        match self {
            Self::E4M3 => 7,
            Self::E5M2 => 15,
            Self::E2M1 => 1,
        }
    }

    /// Returns the number of bits of a code.
    pub const fn bits(self) -> u32 {
        match self {
            Self::E4M3 | Self::E5M2 => 8,
            Self::E2M1 => 4,
        }
    }

    /// Returns the code of the largest finite value.
    pub const fn max_code(self) -> u8 {
        match self {
            Self::E4M3 => 0x7e,
            Self::E5M2 => 0x7b,
            Self::E2M1 => 0x7,
        }
    }

    /// Returns the code of NaN. For formats without NaN, returns the code of the largest value, as PTX's
    /// `cvt.rn.satfinite` does.
    pub const fn nan_code(self) -> u8 {
        match self {
            Self::E4M3 | Self::E5M2 => 0x7f,
            Self::E2M1 => 0x7,
        }
    }

    /// Returns the code of the nearest value. Ties are rounded to the even code. Values beyond the largest finite
    /// value, including infinities, saturate to the largest finite value. The infinities of E5M2 are therefore never
    /// produced.
    // The function has no branches, so that loops over it are compiled to SIMD code.
    #[inline(always)]
    pub fn encode(self, value: f32) -> u8 {
        let bits = value.to_bits();
        let magnitude = bits & 0x7fff_ffff;
        let sign = (bits >> 31) << (self.bits() - 1);
        let (mantissa, bias) = (self.mantissa_bits(), self.bias());
        let dropped = 23 - mantissa;
        // Below the smallest normal value, adding a float whose last bit is the smallest step rounds to that step.
        let step = (127 + 1 - bias + dropped) << 23;
        let sum = f32::from_bits(magnitude) + f32::from_bits(step);
        let small = sum.to_bits().wrapping_sub(step);
        let odd = (magnitude >> dropped) & 1;
        let rounded = magnitude + ((1 << (dropped - 1)) - 1) + odd;
        let normal = (rounded >> dropped).wrapping_sub((127 - bias) << mantissa);
        let is_small = magnitude < (128 - bias) << 23;
        // Rounding up can exceed the largest code.
        let code = if is_small { small } else { normal }.min(u32::from(self.max_code()));
        let is_nan = magnitude > 0x7f80_0000;
        let nan = u32::from(self.nan_code());
        (if is_nan { nan } else { sign | code }) as u8
    }

    /// Returns the exact value of a code. Higher bits of `code` than the format has are ignored.
    pub fn decode(self, code: u8) -> f32 {
        let (mantissa, bias) = (self.mantissa_bits(), self.bias());
        let sign = (u32::from(code) >> (self.bits() - 1) & 1) << 31;
        let magnitude = u32::from(code) & ((1 << (self.bits() - 1)) - 1);
        let beyond = magnitude > u32::from(self.max_code());
        let value = if beyond {
            match (self, magnitude) {
                (Self::E5M2, 0x7c) => 0x7f80_0000,
                _ => 0x7fc0_0000,
            }
        } else if magnitude >> mantissa == 0 {
            (magnitude as f32 * self.min_positive()).to_bits()
        } else {
            (magnitude + ((127 - bias) << mantissa)) << (23 - mantissa)
        };
        f32::from_bits(sign | value)
    }
}

/// The rounding mode of [`e8m0::encode`], which rounds a value to a power of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rounding {
    /// Rounds to the nearest power of two. A value halfway between two powers, `1.5 * 2^n`, is rounded up. This is
    /// rounding to nearest even: if both powers are divided by the lower power, they are 1 (odd) and 2 (even).
    Nearest,
    /// Rounds up to the next power of two. Powers of two do not change.
    Up,
}

/// The E8M0 format for scales. A value is a power of two from 2^-127 to 2^127, stored as its exponent plus 127. Code
/// 255 is NaN.
pub mod e8m0 {
    use super::Rounding;

    /// The code of NaN.
    pub const NAN: u8 = 255;

    /// The code of the largest value, 2^127.
    pub const MAX: u8 = 254;

    /// Returns the code of `value`, rounded to a power of two.
    ///
    /// Values below 2^-127, including 0, become 2^-127. Values above 2^127, including infinity, become 2^127. NaN and
    /// negative values become NaN, but -0 becomes 2^-127.
    pub fn encode(value: f32, rounding: Rounding) -> u8 {
        let bits = value.to_bits();
        if bits & 0x7fff_ffff > 0x7f80_0000 || bits > 0x8000_0000 {
            return NAN;
        }
        let (exponent, mantissa) = (bits >> 23 & 0xff, bits & 0x007f_ffff);
        // 2^-127 is subnormal in f32. Its mantissa is half of the mantissa range.
        let up = match (rounding, exponent) {
            (Rounding::Nearest, 0) => mantissa >= 0x0060_0000,
            (Rounding::Nearest, _) => mantissa >= 0x0040_0000,
            (Rounding::Up, 0) => mantissa > 0x0040_0000,
            (Rounding::Up, _) => mantissa > 0,
        };
        (exponent + u32::from(up)).min(u32::from(MAX)) as u8
    }

    /// Returns the code of the scale for an E4M3 block with the largest magnitude `amax`. The scale is `amax / 448`,
    /// rounded up to a power of two. An `amax` of 0 gives the smallest scale, infinity gives the largest scale, and NaN
    /// gives NaN.
    ///
    /// 448 is `1.75 * 2^8`, so no division is needed: the exponent of the scale is the exponent of `amax` minus 8, or
    /// minus 7 if the mantissa of `amax` is above 1.75.
    pub fn of_amax(amax: f32) -> u8 {
        let bits = amax.to_bits() & 0x7fff_ffff;
        if bits > 0x7f80_0000 {
            return NAN;
        }
        if bits == 0x7f80_0000 {
            return MAX;
        }
        let up = u32::from(bits & 0x007f_ffff > 0x0060_0000);
        ((bits >> 23) + up).saturating_sub(8) as u8
    }

    /// Returns the value of a code.
    pub fn decode(code: u8) -> f32 {
        match code {
            0 => f32::from_bits(0x0040_0000),
            255 => f32::NAN,
            code => f32::from_bits(u32::from(code) << 23),
        }
    }
}
