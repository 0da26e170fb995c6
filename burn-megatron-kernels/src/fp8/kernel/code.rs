//! One value to its code and back, on the device; bit for bit what [`Format`] and
//! [`e8m0`](crate::fp8::e8m0) do on the CPU.
//!
//! It uses integer arithmetic only: shading languages leave open how float additions round and
//! whether subnormal floats are flushed, and have no 8-bit type. Only if the processor has an
//! encoding instruction, that is used.

use cubecl::ir::{DeviceProperties, ElemType, FloatKind};
use cubecl::prelude::*;
use cubecl::{e4m3, e5m2};

use crate::fp8::format::{Format, Rounding, e8m0};

/// Above these bits a magnitude is NaN.
const INFINITY: u32 = 0x7f80_0000;

/// The code of the nearest value, ties to the even code; see [`Format::encode`].
#[cube]
pub(crate) fn encode(value: f32, #[comptime] format: Format) -> u32 {
    let device = comptime::device_properties();
    let native = comptime!(has_instruction(&device, format));
    let code = match comptime!((native, format)) {
        (true, Format::E4M3) => u32::cast_from(u8::reinterpret(e4m3::cast_from(value))),
        (true, Format::E5M2) => u32::cast_from(u8::reinterpret(e5m2::cast_from(value))),
        _ => encode_bits(value, format),
    };
    let nan = comptime!(u32::from(format.nan_code()));
    select(
        u32::reinterpret(value) & 0x7fff_ffff > INFINITY,
        nan.runtime(),
        code,
    )
}

/// Whether a cast to the format is one instruction of the processor.
///
/// CubeCL's CUDA C++ has matrix instructions for these types where the processor has
/// `cvt.rn.satfinite`, from compute capability 8.9 on, and casts with it: to the nearest, ties to
/// even, saturating; the code of NaN is unspecified. Its casts elsewhere consist of float
/// operations and depend on how a device rounds those.
fn has_instruction(device: &DeviceProperties, format: Format) -> bool {
    let kind = match format {
        Format::E4M3 => FloatKind::E4M3,
        Format::E5M2 => FloatKind::E5M2,
        Format::E2M1 => return false,
    };
    let mut products = device.features.matmul.mma.iter();
    products.any(|product| product.a_type == ElemType::Float(kind))
}

/// The code of what is not NaN.
#[cube]
fn encode_bits(value: f32, #[comptime] format: Format) -> u32 {
    let bits = u32::reinterpret(value);
    let magnitude = bits & 0x7fff_ffff;
    let mantissa = comptime!(format.mantissa_bits());
    // The exponent of the smallest normal value, biased as in f32.
    let least = comptime!(128 - format.bias());

    // Below that a value loses one bit more for each power of two; when 25 of the 24 are dropped,
    // nothing is left that could round up.
    let exponent = magnitude >> 23;
    let raised = max(exponent, least);
    let dropped = min(raised - exponent + comptime!(23 - mantissa), 25u32);
    let significand = (magnitude & 0x007f_ffff) | 0x0080_0000;
    let odd = (significand >> dropped) & 1;
    let rounded = (significand + (1u32 << (dropped - 1)) - 1u32 + odd) >> dropped;
    // A carry out of the mantissa is one step of the exponent, as it should be.
    let code = min(
        rounded + ((raised - least) << mantissa),
        comptime!(u32::from(format.max_code())),
    );
    code | ((bits >> 31) << comptime!(format.bits() - 1))
}

/// The value of a code; higher bits are ignored. See [`Format::decode`].
#[cube]
pub(crate) fn decode(code: u32, #[comptime] format: Format) -> f32 {
    let mantissa = comptime!(format.mantissa_bits());
    let sign = ((code >> comptime!(format.bits() - 1)) & 1) << 31;
    let magnitude = code & comptime!((1u32 << (format.bits() - 1)) - 1);
    // All values of the formats are normal in f32: no product here is subnormal.
    let small = u32::reinterpret(f32::cast_from(magnitude) * comptime!(format.min_positive()));
    let raised = magnitude + comptime!((127 - format.bias()) << mantissa);
    let large = raised << comptime!(23 - mantissa);
    let mut value = select(magnitude < comptime!(1u32 << mantissa), small, large);
    if comptime!(format != Format::E2M1) {
        let most = comptime!(u32::from(format.max_code()));
        value = select(magnitude > most, 0x7fc0_0000u32, value);
    }
    if comptime!(format == Format::E5M2) {
        value = select(magnitude == 0x7c, INFINITY, value);
    }
    f32::reinterpret(sign | value)
}

/// The codes of the values from `first` on, as many as a word holds, the first in the lowest bits.
#[cube]
pub(crate) fn encode_word<N: Size>(
    values: Vector<f32, N>,
    #[comptime] first: usize,
    #[comptime] format: Format,
) -> u32 {
    let device = comptime::device_properties();
    let native = comptime!(has_instruction(&device, format));
    if comptime!(native) {
        let mut four = Vector::<f32, Const<4>>::empty();
        #[unroll]
        for at in 0..4usize {
            four.insert(at, values.extract(comptime!(first + at)));
        }
        // NaN if any of them is.
        let low = four.extract(0usize) + four.extract(1usize);
        let high = four.extract(2usize) + four.extract(3usize);
        let mut word = packed(four, format);
        if (low + high).is_nan() {
            word = encode_each(values, first, format);
        }
        word
    } else {
        encode_each(values, first, format)
    }
}

/// The codes of four values by the processor's instruction. What NaN becomes is left open.
#[cube]
fn packed(four: Vector<f32, Const<4>>, #[comptime] format: Format) -> u32 {
    match comptime!(format) {
        Format::E5M2 => {
            let codes = Vector::<e5m2, Const<4>>::cast_from(four);
            Vector::<u32, Const<1>>::reinterpret(codes).extract(0usize)
        }
        _ => {
            let codes = Vector::<e4m3, Const<4>>::cast_from(four);
            Vector::<u32, Const<1>>::reinterpret(codes).extract(0usize)
        }
    }
}

/// See [`encode_word`]: one value at a time.
#[cube]
fn encode_each<N: Size>(
    values: Vector<f32, N>,
    #[comptime] first: usize,
    #[comptime] format: Format,
) -> u32 {
    let bits = comptime!(format.bits());
    let mut word = 0u32;
    #[unroll]
    for at in 0..comptime!((32 / bits) as usize) {
        let value = values.extract(comptime!(first + at));
        word |= encode(value, format) << comptime!(bits * at as u32);
    }
    word
}

/// The code of the scale of a block whose largest magnitude is `amax`; see [`e8m0::of_amax`].
#[cube]
pub(crate) fn e8m0_of_amax(amax: f32) -> u32 {
    let bits = u32::reinterpret(amax) & 0x7fff_ffff;
    let up = u32::cast_from(bits & 0x007f_ffff > 0x0060_0000);
    let code = max((bits >> 23) + up, 8u32) - 8u32;
    let finite = select(
        bits == INFINITY,
        comptime!(u32::from(e8m0::MAX)).runtime(),
        code,
    );
    select(
        bits > INFINITY,
        comptime!(u32::from(e8m0::NAN)).runtime(),
        finite,
    )
}

/// The code of the power of two beside a value; see [`e8m0::encode`].
#[cube]
pub(crate) fn e8m0_encode(value: f32, #[comptime] rounding: Rounding) -> u32 {
    let bits = u32::reinterpret(value);
    let magnitude = bits & 0x7fff_ffff;
    let exponent = magnitude >> 23;
    // The smallest mantissa that is rounded up; 2^-127 itself is subnormal in f32.
    let (normal, subnormal) = match comptime!(rounding) {
        Rounding::Nearest => (0x0040_0000u32, 0x0060_0000u32),
        Rounding::Up => (1u32, 0x0040_0001u32),
    };
    let least = select(exponent == 0, subnormal, normal);
    let up = u32::cast_from(magnitude & 0x007f_ffff >= least);
    let code = min(exponent + up, comptime!(u32::from(e8m0::MAX)));
    let invalid = magnitude > INFINITY || bits > 0x8000_0000u32;
    select(invalid, comptime!(u32::from(e8m0::NAN)).runtime(), code)
}

/// The value of a code of E8M0; higher bits are ignored. See [`e8m0::decode`].
///
/// 2^-127 is subnormal in f32: a device may take it for 0 in arithmetic; see [`e8m0_factors`].
#[cube]
pub(crate) fn e8m0_decode(code: u32) -> f32 {
    let code = code & 0xff;
    let value = select(code == 0, 0x0040_0000u32, code << 23);
    f32::reinterpret(select(code == 255, 0x7fc0_0000u32, value))
}

/// Two factors of `2^(127 - code)`, neither of them subnormal; NaN for NaN. `code` has 8 bits.
#[cube]
pub(crate) fn e8m0_factors(code: u32) -> (f32, f32) {
    // The exponent counted from -128 on, so that halving is a shift.
    let exponent = 255u32 - code;
    let half = exponent >> 1;
    let nan = code == 255;
    let first = select(nan, 0x7fc0_0000u32, (half + 63u32) << 23);
    let second = select(nan, 0x7fc0_0000u32, (exponent - half + 63u32) << 23);
    (f32::reinterpret(first), f32::reinterpret(second))
}
