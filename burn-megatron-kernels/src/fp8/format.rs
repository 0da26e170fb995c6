//! The 8- and 4-bit formats, and their codes one by one.
//!
//! E4M3, E5M2: Micikevicius et al. 2022, arXiv:2209.05433. E2M1, E8M0: OCP Microscaling Formats (MX)
//! Specification 1.0. Everything here is arithmetic on bits, so that every device can do the same.

/// A float of 8 or 4 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// 4 bits of exponent, 3 of mantissa: up to 448, no infinity, one NaN.
    E4M3,
    /// 5 bits of exponent, 2 of mantissa: up to 57 344, with infinity and NaN.
    E5M2,
    /// 2 bits of exponent, 1 of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6. No infinity, no NaN.
    E2M1,
}

impl Format {
    /// The largest finite value.
    pub const fn max(self) -> f32 {
        match self {
            Self::E4M3 => 448.0,
            Self::E5M2 => 57_344.0,
            Self::E2M1 => 6.0,
        }
    }

    /// The smallest value above zero.
    pub const fn min_positive(self) -> f32 {
        match self {
            Self::E4M3 => 1.0 / 512.0,
            Self::E5M2 => 1.0 / 65_536.0,
            Self::E2M1 => 0.5,
        }
    }

    /// Bits of the mantissa.
    pub const fn mantissa_bits(self) -> u32 {
        match self {
            Self::E4M3 => 3,
            Self::E5M2 => 2,
            Self::E2M1 => 1,
        }
    }

    /// Returns the number that is added to an exponent before it is stored.
    pub const fn bias(self) -> u32 {
        match self {
            Self::E4M3 => 7,
            Self::E5M2 => 15,
            Self::E2M1 => 1,
        }
    }

    /// Bits of a code.
    pub const fn bits(self) -> u32 {
        match self {
            Self::E4M3 | Self::E5M2 => 8,
            Self::E2M1 => 4,
        }
    }

    /// The code of the largest finite value.
    pub const fn max_code(self) -> u8 {
        match self {
            Self::E4M3 => 0x7e,
            Self::E5M2 => 0x7b,
            Self::E2M1 => 0x7,
        }
    }

    /// The code of NaN; for formats without NaN that of the largest value, as in PTX's
    /// `cvt.rn.satfinite`.
    pub const fn nan_code(self) -> u8 {
        match self {
            Self::E4M3 | Self::E5M2 => 0x7f,
            Self::E2M1 => 0x7,
        }
    }

    /// The code of the nearest value, ties to the even code. Values beyond the largest one,
    /// infinities included, saturate to it: the infinities of E5M2 are never written.
    // No branch: loops over it become SIMD code.
    #[inline(always)]
    pub fn encode(self, value: f32) -> u8 {
        let bits = value.to_bits();
        let magnitude = bits & 0x7fff_ffff;
        let sign = (bits >> 31) << (self.bits() - 1);
        let (mantissa, bias) = (self.mantissa_bits(), self.bias());
        let dropped = 23 - mantissa;
        // Below the smallest normal value: a float whose last bit is the smallest step is added,
        // which rounds as the processor does.
        let step = (127 + 1 - bias + dropped) << 23;
        let sum = f32::from_bits(magnitude) + f32::from_bits(step);
        let small = sum.to_bits().wrapping_sub(step);
        let odd = (magnitude >> dropped) & 1;
        let rounded = magnitude + ((1 << (dropped - 1)) - 1) + odd;
        let normal = (rounded >> dropped).wrapping_sub((127 - bias) << mantissa);
        let is_small = magnitude < (128 - bias) << 23;
        // Rounding up can pass the largest code.
        let code = if is_small { small } else { normal }.min(u32::from(self.max_code()));
        let is_nan = magnitude > 0x7f80_0000;
        let nan = u32::from(self.nan_code());
        (if is_nan { nan } else { sign | code }) as u8
    }

    /// The value of a code, exactly; higher bits are ignored.
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

/// The rounding of a value between two powers of two to one of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rounding {
    /// To the nearer one; from halfway, `1.5 * 2^n`, up. That is rounding to nearest even: of the two
    /// significands, 1 and 2 halves of the upper power, 2 is even.
    Nearest,
    /// To the upper one.
    Up,
}

/// E8M0: a power of two from 2^-127 to 2^127 as its exponent plus 127; 255 is NaN.
pub mod e8m0 {
    use super::Rounding;

    /// The code of NaN.
    pub const NAN: u8 = 255;

    /// The code of the largest value, 2^127.
    pub const MAX: u8 = 254;

    /// The code of `value` as a power of two.
    ///
    /// Values below 2^-127, 0 included, become 2^-127; values beyond 2^127 and infinity become
    /// 2^127. NaN and negative values become NaN, -0 does not.
    pub fn encode(value: f32, rounding: Rounding) -> u8 {
        let bits = value.to_bits();
        if bits & 0x7fff_ffff > 0x7f80_0000 || bits > 0x8000_0000 {
            return NAN;
        }
        let (exponent, mantissa) = (bits >> 23 & 0xff, bits & 0x007f_ffff);
        // 2^-127 itself is subnormal in f32: half of the mantissa of what lies below 2^-126.
        let up = match (rounding, exponent) {
            (Rounding::Nearest, 0) => mantissa >= 0x0060_0000,
            (Rounding::Nearest, _) => mantissa >= 0x0040_0000,
            (Rounding::Up, 0) => mantissa > 0x0040_0000,
            (Rounding::Up, _) => mantissa > 0,
        };
        (exponent + u32::from(up)).min(u32::from(MAX)) as u8
    }

    /// The code of the scale by which a block whose largest magnitude is `amax` fits below
    /// `max` = 448 of E4M3: `amax / 448`, rounded up to a power of two. 0 gives the smallest scale,
    /// infinity the largest, NaN gives NaN.
    ///
    /// 448 is `1.75 * 2^8`, so this needs no division: the exponent goes down by 8, and up by one
    /// where the mantissa is above 1.75.
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

    /// The value of a code.
    pub fn decode(code: u8) -> f32 {
        match code {
            0 => f32::from_bits(0x0040_0000),
            255 => f32::NAN,
            code => f32::from_bits(u32::from(code) << 23),
        }
    }
}
