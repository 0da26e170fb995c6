//! Computes scales from largest magnitudes.

use crate::cpu::{Element, Real};
use crate::fp8::format::{Format, e8m0};
use crate::fp8::quantize::scaling::CurrentScale;

/// Converts the value to f32.
#[inline(always)]
pub(super) fn single<E: Element>(value: E) -> f32 {
    value.wide().double() as f32
}

/// Returns the bits of the largest magnitude. The bits of NaN are larger than the bits of all numbers.
#[inline(always)]
pub(super) fn largest(values: impl Iterator<Item = f32>) -> u32 {
    values.fold(0, |most, value| most.max(value.to_bits() & 0x7fff_ffff))
}

/// Computes the scale. See [`current_scale`](crate::fp8::current_scale).
pub(super) fn current(amax: f32, format: Format, options: CurrentScale) -> f32 {
    let amax = if amax < options.epsilon {
        options.epsilon
    } else {
        amax
    };
    if amax == 0.0 || !amax.is_finite() {
        return 1.0;
    }
    let scale = (format.max() / amax).min(f32::MAX);
    if options.power_of_two {
        f32::from_bits(scale.to_bits() & 0x7f80_0000)
    } else {
        scale
    }
}

/// Returns two factors whose product is `2^(127 - code)`. Neither factor is subnormal. Returns NaN for the code of NaN.
pub(super) fn factors(code: u8) -> [f32; 2] {
    if code == e8m0::NAN {
        return [f32::NAN; 2];
    }
    let exponent = 127 - i32::from(code);
    let half = exponent / 2;
    [half, exponent - half].map(|e| f32::from_bits(((e + 127) as u32) << 23))
}
