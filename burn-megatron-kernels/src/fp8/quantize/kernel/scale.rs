//! Computes scales on the device, and multiplies values by scales.
//!
//! Shading languages may flush subnormal floats to 0, as operands and as results. Values that can be subnormal are
//! therefore handled as bits, so that scales and codes equal the results on the CPU.

use cubecl::prelude::*;

use crate::fp8::format::Format;

/// Returns the bits of the absolute value. The bits of NaN are larger than the bits of all numbers.
#[cube]
pub(crate) fn magnitude(value: f32) -> u32 {
    u32::reinterpret(value) & 0x7fff_ffff
}

/// Returns `value * factor`. The product is rounded once if it is a normal number. A subnormal product may become 0.
/// Its code is 0 in both cases, because all nonzero values of the formats are far larger.
///
/// `value` may be subnormal, even on a device that `flushes` such numbers. `factor` must not be subnormal.
#[cube]
pub(crate) fn times(value: f32, factor: f32, #[comptime] flushes: bool) -> f32 {
    if comptime!(flushes) {
        let bits = u32::reinterpret(value);
        let most = bits & 0x7fff_ffff;
        let small = most < 0x0080_0000;
        // A subnormal number is multiplied by 2^23, which gives a normal number.
        let large = u32::reinterpret(f32::cast_from(most) * f32::reinterpret(0x0080_0000u32));
        let signed = f32::reinterpret(large | (bits & 0x8000_0000));
        let product = select(small, signed, value) * factor;
        select(small, product * f32::reinterpret(0x3400_0000u32), product)
    } else {
        value * factor
    }
}

/// Returns the bits of the factor that multiplies the values of a block. `amax` holds the bits of the block's largest
/// magnitude. See [`quantize`](crate::fp8::quantize).
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
        // The exponent is the difference of the exponents, minus one if the mantissa of the divisor is larger.
        let less = u32::cast_from((amax & 0x007f_ffff) > comptime!(most & 0x007f_ffff));
        let exponent = comptime!((most >> 23) + 127) - (amax >> 23) - less;
        scale = min(exponent, 254u32) << 23;
    } else {
        // With a subnormal divisor, the quotient would exceed the largest float.
        if amax >= 0x0080_0000 {
            let quotient = comptime!(format.max()) / f32::reinterpret(amax);
            scale = min(u32::reinterpret(quotient), 0x7f7f_ffffu32);
        }
    }
    select(ordinary, scale, 0x3f80_0000u32)
}

/// Returns the bits of the reciprocal of a scale. `scale` holds the bits of the scale.
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

/// Returns the reciprocal of a number of at least 2^126. The reciprocal is subnormal. The function divides bit by bit
/// and rounds to nearest even.
#[cube]
fn small_reciprocal(scale: u32) -> u32 {
    let divisor = (scale & 0x007f_ffff) | 0x0080_0000;
    // The division starts with the quotient of 2^23, which is at most the divisor. Each step of the loop adds one bit,
    // until a unit of the quotient is the smallest float.
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
