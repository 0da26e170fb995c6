//! Scales, and products with them, on the device.
//!
//! Shading languages may flush subnormal floats to 0, as operands and as results. Values that can
//! be subnormal are handled by their bits here, so that scales and codes equal those of the CPU.

use cubecl::prelude::*;

use crate::fp8::format::Format;

/// The bits of a magnitude; those of NaN are above all others.
#[cube]
pub(crate) fn magnitude(value: f32) -> u32 {
    u32::reinterpret(value) & 0x7fff_ffff
}

/// `value * factor`, rounded once where the result is a normal number. Where it is not, it may be 0,
/// and so is its code, as all values of the formats are far larger.
///
/// `value` may be subnormal, also on a device that `flushes` such numbers; `factor` may not.
#[cube]
pub(crate) fn times(value: f32, factor: f32, #[comptime] flushes: bool) -> f32 {
    if comptime!(flushes) {
        let bits = u32::reinterpret(value);
        let most = bits & 0x7fff_ffff;
        let small = most < 0x0080_0000;
        // As a number 2^23 times as large it is a normal one.
        let large = u32::reinterpret(f32::cast_from(most) * f32::reinterpret(0x0080_0000u32));
        let signed = f32::reinterpret(large | (bits & 0x8000_0000));
        let product = select(small, signed, value) * factor;
        select(small, product * f32::reinterpret(0x3400_0000u32), product)
    } else {
        value * factor
    }
}

/// The bits of what a block is multiplied with whose largest magnitude has the bits `amax`: see
/// [`quantize`](crate::fp8::quantize).
#[cube]
pub(crate) fn block_scale(
    amax: u32,
    #[comptime] format: Format,
    #[comptime] power_of_two: bool,
) -> u32 {
    let most = comptime!(format.max().to_bits());
    let ordinary = amax > 0 && amax < 0x7f80_0000;
    let mut scale = 0x7f7f_ffffu32.runtime();
    if comptime!(power_of_two) {
        // The exponents' difference, one less where the mantissa of the divisor is the larger one.
        let less = u32::cast_from((amax & 0x007f_ffff) > comptime!(most & 0x007f_ffff));
        let exponent = comptime!((most >> 23) + 127) - (amax >> 23) - less;
        scale = min(exponent, 254u32) << 23;
    } else {
        // A subnormal divisor gives more than there is.
        if amax >= 0x0080_0000 {
            let quotient = comptime!(format.max()) / f32::reinterpret(amax);
            scale = min(u32::reinterpret(quotient), 0x7f7f_ffffu32);
        }
    }
    select(ordinary, scale, 0x3f80_0000u32)
}

/// The bits of one over a scale that is given by its bits.
#[cube]
pub(crate) fn reciprocal(scale: u32, #[comptime] power_of_two: bool) -> u32 {
    let exponent = scale >> 23;
    if comptime!(power_of_two) {
        select(exponent == 254, 0x0040_0000u32, (254u32 - exponent) << 23)
    } else {
        let mut result = u32::reinterpret(1.0f32 / f32::reinterpret(scale));
        if exponent == 253 || exponent == 254 {
            result = small_reciprocal(scale);
        }
        result
    }
}

/// One over a number from 2^126 on, which is subnormal: division bit by bit, rounded to nearest even.
#[cube]
fn small_reciprocal(scale: u32) -> u32 {
    let divisor = (scale & 0x007f_ffff) | 0x0080_0000;
    // The quotient of 2^23, which is not above the divisor, and then of one more bit at a time, up
    // to the exponent at which a unit is the smallest float.
    let mut quotient = u32::cast_from(divisor == 0x0080_0000);
    let mut rest = 0x0080_0000u32 - quotient * 0x0080_0000u32;
    for _bit in 0..276u32 - (scale >> 23) {
        rest *= 2;
        quotient *= 2;
        if rest >= divisor {
            rest -= divisor;
            quotient += 1;
        }
    }
    let twice = rest * 2;
    let up = twice > divisor || (twice == divisor && quotient & 1 == 1);
    quotient + u32::cast_from(up)
}
