//! Fast conversions of the common formats with host arithmetic. They avoid branches, so that loops over lanes are
//! vectorized.

use super::Mode;

/// Returns a sum rounded to odd: the last bit is set if the sum is inexact. Rounding this sum to a format of at most
/// 51 bits equals rounding the exact sum.
#[inline(always)]
pub fn odd_sum(a: f64, b: f64) -> f64 {
    let sum = a + b;
    let from_b = sum - a;
    let rest = (a - (sum - from_b)) + (b - from_b);
    let bits = sum.to_bits();
    // The odd neighbour is on the side of the rest.
    let outward = (rest > 0.0) == (sum > 0.0);
    let other = if outward {
        bits + 1
    } else {
        bits.wrapping_sub(1)
    };
    let inexact = (rest > 0.0) | (rest < 0.0);
    f64::from_bits(if inexact & (bits & 1 == 0) {
        other
    } else {
        bits
    })
}

/// Converts to f32 with rounding to odd: the last bit is set if the result is inexact.
#[inline(always)]
pub fn odd_single(number: f64) -> f32 {
    let near = number as f32;
    let back = f64::from(near);
    let bits = near.to_bits();
    let inward = bits.wrapping_sub(u32::from(back.abs() > number.abs()));
    let inexact = (back > number) | (back < number);
    f32::from_bits(if inexact { inward | 1 } else { bits })
}

/// Converts to f32 with the given rounding mode.
#[inline(always)]
pub fn single(number: f64, mode: Mode) -> f32 {
    let near = number as f32;
    let back = f64::from(near);
    match mode {
        Mode::Zero if back.abs() > number.abs() => f32::from_bits(near.to_bits() - 1),
        Mode::Down if back > number => near.next_down(),
        Mode::Up if back < number => near.next_up(),
        _ => near,
    }
}

#[inline(always)]
pub fn from_f16(bits: u64) -> f32 {
    let sign = (bits as u32 & 0x8000) << 16;
    // The exponent is too small by the difference of the biases.
    let size = f32::from_bits((bits as u32 & 0x7fff) << 13) * f32::from_bits((254 - 15) << 23);
    let code = size.to_bits() | if size >= 65536.0 { 0x7f80_0000 } else { 0 };
    let nan = bits & 0x7fff > 0x7c00;
    f32::from_bits(if nan { 0x7fff_ffff } else { code | sign })
}

/// Returns the nearest f16.
#[inline(always)]
pub fn to_f16(number: f32) -> u64 {
    let bits = number.to_bits();
    let (sign, size) = (bits >> 16 & 0x8000, bits & 0x7fff_ffff);
    let odd = size >> 13 & 1;
    let normal = size
        .wrapping_add(0xfff + odd)
        .wrapping_sub((127 - 15) << 23)
        >> 13;
    // Adding this constant aligns the last bit of a number with the last bit of a subnormal f16.
    let unit = f32::from_bits((127 - 15 + 23 - 10 + 1) << 23);
    let small = (f32::from_bits(size) + unit)
        .to_bits()
        .wrapping_sub(unit.to_bits());
    let code = if size < (127 - 14) << 23 {
        small
    } else {
        normal
    };
    // A number that rounds up to 65536 has already carried into infinity.
    let code = if size >= 0x4780_0000 { 0x7c00 } else { code };
    u64::from(if size > 0x7f80_0000 {
        0x7fff
    } else {
        code | sign
    })
}

#[inline(always)]
pub fn from_bf16(bits: u64) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// Returns the nearest bf16.
#[inline(always)]
pub fn to_bf16(number: f32) -> u64 {
    let bits = number.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    u64::from(if number.is_nan() { 0x7fff } else { rounded })
}

/// Replaces a subnormal number with a zero of the same sign.
#[inline(always)]
pub fn flush(number: f32) -> f32 {
    let bits = number.to_bits();
    let small = bits & 0x7f80_0000 == 0;
    f32::from_bits(if small { bits & 0x8000_0000 } else { bits })
}

/// Returns the bits of an f32. All NaNs become the same NaN.
#[inline(always)]
pub fn bits(number: f32) -> u64 {
    u64::from(if number.is_nan() {
        0x7fff_ffff
    } else {
        number.to_bits()
    })
}

/// Returns the bits of an f64. All NaNs become the same NaN.
#[inline(always)]
pub fn bits64(number: f64) -> u64 {
    // Tests the bits, since a compiler may return any NaN when it selects a float.
    match number.to_bits() {
        bits if bits & (u64::MAX >> 1) > 0x7ff0_0000_0000_0000 => 0xfff8_0000_0000_0000,
        bits => bits,
    }
}

/// Returns `2^number` to within two units in the last place of f64, if the result is in the range of f32. Otherwise
/// the result is also beyond the range of f32.
#[inline(always)]
pub fn exp2(number: f64) -> f64 {
    let number = number.clamp(-1000.0, 1000.0);
    // Adding this constant moves the integer part to the last bits.
    let unit = 1.5 * 2f64.powi(52);
    let raised = number + unit;
    let power = raised.to_bits().wrapping_sub(unit.to_bits());
    let rest = (number - (raised - unit)) * std::f64::consts::LN_2;
    // The Taylor series of exp, up to rest^13 / 13!, evaluated from its end.
    let mut sum = 1.0;
    for divisor in (1..=13u8).rev() {
        sum = sum * rest * (1.0 / f64::from(divisor)) + 1.0;
    }
    sum * f64::from_bits(power.wrapping_add(1023) << 52)
}
