//! The number formats of tensor cores, as f64. f64 represents every value of these formats exactly.

use half::f16;

/// The format of elements in registers.
pub(super) trait Element: 'static {
    /// The number of bits of an element in a register.
    const BITS: u32;
    /// Returns the value of the lowest bits. The bits above them are ignored.
    fn value(bits: u64) -> f64;
}

/// The format of accumulators.
pub(super) trait Accumulator: Element {
    /// Returns the bits of the nearest number. Integers wrap or saturate.
    fn bits(value: f64) -> u64;
}

/// Returns the number of elements in a register.
pub(super) const fn per_register(bits: u32) -> usize {
    match bits {
        32.. => 1,
        _ => (32 / bits) as usize,
    }
}

/// Returns the value of a number with `E` bits of exponent and `M` bits of mantissa. `FINITE` selects the special
/// codes:
///
/// - 0: as in IEEE 754.
/// - 1: no infinity, and one NaN (`e4m3`).
/// - 2: neither infinity nor NaN (the formats of 4 and 6 bits).
fn small<const E: u32, const M: u32, const FINITE: u32>(bits: u64) -> f64 {
    let mantissa = (bits & ((1 << M) - 1)) as f64;
    let exponent = (bits >> M & ((1 << E) - 1)) as i32;
    let (last, bias) = ((1 << E) - 1, (1 << (E - 1)) - 1);
    let one = f64::from(1u32 << M);
    let power = |exponent: i32| f64::from_bits(((1023 + exponent) as u64) << 52);
    let magnitude = match exponent {
        _ if FINITE == 0 && exponent == last && mantissa == 0.0 => f64::INFINITY,
        _ if FINITE == 0 && exponent == last => f64::NAN,
        _ if FINITE == 1 && exponent == last && mantissa == one - 1.0 => f64::NAN,
        0 => mantissa / one * power(1 - bias),
        _ => (1.0 + mantissa / one) * power(exponent - bias),
    };
    match bits >> (E + M) & 1 {
        0 => magnitude,
        _ => -magnitude,
    }
}

macro_rules! elements {
    ($($(#[$doc:meta])* $name:ident, $bits:literal, $value:expr;)*) => {$(
        $(#[$doc])*
        pub(super) struct $name;
        impl Element for $name {
            const BITS: u32 = $bits;
            #[inline]
            fn value(bits: u64) -> f64 {
                let value: fn(u64) -> f64 = $value;
                value(bits)
            }
        }
    )*};
}

elements! {
    F16, 16, |bits| {
        // A multiplication corrects the bias of the exponent. It also handles subnormal numbers.
        let magnitude = f32::from_bits((bits as u32 & 0x7fff) << 13);
        let magnitude = if bits & 0x7c00 == 0x7c00 {
            f32::from_bits(magnitude.to_bits() | 0x7f80_0000)
        } else {
            magnitude * f32::from_bits((127 + 112) << 23)
        };
        f64::from(if bits & 0x8000 == 0 { magnitude } else { -magnitude })
    };
    Bf16, 16, |bits| f64::from(f32::from_bits((bits as u32) << 16));
    /// The lower 13 bits are ignored.
    Tf32, 32, |bits| f64::from(f32::from_bits(bits as u32 & !0x1fff));
    F32, 32, |bits| f64::from(f32::from_bits(bits as u32));
    F64, 64, f64::from_bits;
    S8, 8, |bits| f64::from(bits as i8);
    U8, 8, |bits| f64::from(bits as u8);
    S4, 4, |bits| f64::from((bits as i8) << 4 >> 4);
    U4, 4, |bits| f64::from(bits as u8 & 15);
    S32, 32, |bits| f64::from(bits as i32);
    /// Used for `.satfinite`.
    Saturated, 32, |bits| f64::from(bits as i32);
    E4m3, 8, small::<4, 3, 1>;
    E5m2, 8, small::<5, 2, 0>;
    /// Stored in the lower bits of a byte.
    E3m2, 8, small::<3, 2, 2>;
    /// Stored in the lower bits of a byte.
    E2m3, 8, small::<2, 3, 2>;
    /// Stored in the middle of a byte.
    E2m1, 8, |bits| small::<2, 1, 2>(bits >> 2);
}

impl Accumulator for F16 {
    fn bits(value: f64) -> u64 {
        if value.is_nan() {
            0x7fff
        } else {
            f16::from_f32(to_odd(value)).to_bits().into()
        }
    }
}

impl Accumulator for F32 {
    fn bits(value: f64) -> u64 {
        if value.is_nan() {
            0x7fff_ffff
        } else {
            (value as f32).to_bits().into()
        }
    }
}

impl Accumulator for F64 {
    fn bits(value: f64) -> u64 {
        if value.is_nan() {
            0x7fff_ffff_ffff_ffff
        } else {
            value.to_bits()
        }
    }
}

impl Accumulator for S32 {
    fn bits(value: f64) -> u64 {
        (value as i64 as u32).into()
    }
}

impl Accumulator for Saturated {
    fn bits(value: f64) -> u64 {
        (value as i32 as u32).into()
    }
}

/// Rounds towards zero, and sets the last bit if the value is inexact. A second rounding to fewer bits then equals a
/// single rounding.
fn to_odd(value: f64) -> f32 {
    let near = value as f32;
    let back = f64::from(near);
    if back == value {
        return near;
    }
    let bits = near.to_bits();
    if back.abs() > value.abs() {
        f32::from_bits((bits - 1) | 1)
    } else {
        f32::from_bits(bits | 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_are_what_the_half_crate_says() {
        for bits in 0..=u16::MAX {
            let (f, b) = (f16::from_bits(bits), half::bf16::from_bits(bits));
            let same = |a: f64, b: f64| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
            assert!(same(F16::value(bits.into()), f.to_f64()), "{bits:#x}");
            assert!(same(Bf16::value(bits.into()), b.to_f64()), "{bits:#x}");
            if !f.is_nan() {
                assert_eq!(F16::bits(f.to_f64()), u64::from(bits));
            }
        }
    }

    #[test]
    fn small_formats_have_their_extremes() {
        assert_eq!(E4m3::value(0x7e), 448.0);
        assert_eq!(E4m3::value(0x01), 2f64.powi(-9));
        assert!(E4m3::value(0xff).is_nan() && E4m3::value(0x78) == 256.0);
        assert_eq!(E5m2::value(0x7b), 57344.0);
        assert_eq!(E5m2::value(0x7c), f64::INFINITY);
        assert_eq!(E5m2::value(0x81), -(2f64.powi(-16)));
        assert!(E5m2::value(0x7d).is_nan());
        assert_eq!(E3m2::value(0x1f), 28.0);
        assert_eq!(E2m3::value(0x3f), -7.5);
        let fours: Vec<_> = (0..8).map(|code| E2m1::value(code << 2)).collect();
        assert_eq!(fours, [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]);
    }

    #[test]
    fn halves_are_rounded_once() {
        // A tie for f16, decided by a bit that f32 does not have.
        let tie = 1.0 + 2f64.powi(-11);
        assert_eq!(F16::bits(tie), 0x3c00);
        assert_eq!(F16::bits(tie + 2f64.powi(-40)), 0x3c01);
        assert_eq!(F16::bits(-tie - 2f64.powi(-40)), 0xbc01);
        assert_eq!(
            F16::bits(1.0 + 3.0 * 2f64.powi(-11) - 2f64.powi(-40)),
            0x3c01
        );
        assert_eq!(F16::bits(65_519.999_999_999), 0x7bff);
        assert_eq!(F16::bits(65520.0), 0x7c00);
        assert_eq!(F16::bits(1e300), 0x7c00);
        assert_eq!(F16::bits(2f64.powi(-25)), 0);
        assert_eq!(F16::bits(2f64.powi(-25) * (1.0 + 1e-12)), 1);
        assert_eq!(F16::bits(1e-300), 0);
    }

    #[test]
    fn whole_numbers_wrap_or_saturate() {
        let beyond = f64::from(i32::MAX) + 1.0;
        assert_eq!(S32::bits(beyond), 0x8000_0000);
        assert_eq!(Saturated::bits(beyond), 0x7fff_ffff);
        assert_eq!(Saturated::bits(-1e12), 0x8000_0000);
        assert_eq!((S4::value(0xf8), U4::value(0xf8)), (-8.0, 8.0));
    }
}
