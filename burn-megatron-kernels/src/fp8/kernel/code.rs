//! Conversion of single values on the device. The results have the same bits as the results of [`Format`] and
//! [`e8m0`](crate::fp8::e8m0) on the CPU.
//!
//! The conversion uses only integer arithmetic, because shading languages do not specify how float additions round or
//! whether subnormal floats are flushed, and have no 8-bit type. If the processor has an instruction for the
//! conversion, the kernels use this instruction.

use cubecl::ir::{DeviceProperties, ElemType, FloatKind};
use cubecl::prelude::*;
use cubecl::{e4m3, e5m2};

use crate::fp8::format::{Format, Rounding, e8m0};

/// The bits of infinity. If the bits of a magnitude are larger, the magnitude is NaN.
const INFINITY: u32 = 0x7f80_0000;

/// Returns the code of the nearest value. Ties are rounded to the even code. See [`Format::encode`].
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

/// Returns whether a conversion to the format is a single instruction of the processor.
///
/// The instruction `cvt.rn.satfinite` exists from compute capability 8.9 on. In this case, CubeCL's CUDA C++ reports
/// matrix instructions for these types and converts with this instruction. It rounds to nearest, ties to even, and
/// saturates. The code of NaN is unspecified. Other conversions of CubeCL consist of float operations and depend on the
/// rounding of the device.
fn has_instruction(device: &DeviceProperties, format: Format) -> bool {
    let kind = match format {
        Format::E4M3 => FloatKind::E4M3,
        Format::E5M2 => FloatKind::E5M2,
        Format::E2M1 => return false,
    };
    let mut products = device.features.matmul.mma.iter();
    products.any(|product| product.a_type == ElemType::Float(kind))
}

/// Returns the code of a value that is not NaN.
#[cube]
fn encode_bits(value: f32, #[comptime] format: Format) -> u32 {
    let bits = u32::reinterpret(value);
    let magnitude = bits & 0x7fff_ffff;
    let mantissa = comptime!(format.mantissa_bits());
    // The exponent of the smallest normal value, biased as in f32.
    let least = comptime!(128 - format.bias());

    // Below this exponent, a value loses one more bit per power of two. If 25 bits are dropped, none of the 24 bits of
    // the mantissa is left, and the value cannot round up.
    let exponent = magnitude >> 23;
    let raised = max(exponent, least);
    let dropped = min(raised - exponent + comptime!(23 - mantissa), 25u32);
    let significand = (magnitude & 0x007f_ffff) | 0x0080_0000;
    let odd = (significand >> dropped) & 1;
    let rounded = (significand + (1u32 << (dropped - 1)) - 1u32 + odd) >> dropped;
    // A carry out of the mantissa correctly increases the exponent by one.
    let code = min(
        rounded + ((raised - least) << mantissa),
        comptime!(u32::from(format.max_code())),
    );
    code | ((bits >> 31) << comptime!(format.bits() - 1))
}

/// Returns the value of a code. Bits above the width of the format are ignored. See [`Format::decode`].
#[cube]
pub(crate) fn decode(code: u32, #[comptime] format: Format) -> f32 {
    let mantissa = comptime!(format.mantissa_bits());
    let sign = ((code >> comptime!(format.bits() - 1)) & 1) << 31;
    let magnitude = code & comptime!((1u32 << (format.bits() - 1)) - 1);
    // All values of the formats are normal in f32, so no product is subnormal.
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

/// Returns a word with the codes of the values, starting at `first`. The first code is in the lowest bits.
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
        // The sum is NaN if any of the values is NaN.
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

/// Returns the codes of four values, using the instruction of the processor. The code of NaN is unspecified.
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

/// Encodes a word of codes one value at a time. See [`encode_word`].
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

/// Returns the code of the scale of a block with the largest magnitude `amax`. See [`e8m0::of_amax`].
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

/// Returns the code of a power of two next to a value. See [`e8m0::encode`].
#[cube]
pub(crate) fn e8m0_encode(value: f32, #[comptime] rounding: Rounding) -> u32 {
    let bits = u32::reinterpret(value);
    let magnitude = bits & 0x7fff_ffff;
    let exponent = magnitude >> 23;
    // The smallest mantissa that is rounded up. It differs for 2^-127, which is subnormal in f32.
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

/// Returns the value of an E8M0 code. Bits above the 8 bits of the code are ignored. See [`e8m0::decode`].
///
/// 2^-127 is subnormal in f32, and a device may treat it as 0 in arithmetic. Use [`e8m0_factors`] to multiply values.
#[cube]
pub(crate) fn e8m0_decode(code: u32) -> f32 {
    let code = code & 0xff;
    let value = select(code == 0, 0x0040_0000u32, code << 23);
    f32::reinterpret(select(code == 255, 0x7fc0_0000u32, value))
}

/// Returns two factors whose product is `2^(127 - code)`. Neither factor is subnormal. Returns NaN for the code of NaN.
/// `code` has 8 bits.
#[cube]
pub(crate) fn e8m0_factors(code: u32) -> (f32, f32) {
    // The exponent is counted from -128, so that it can be halved by a shift.
    let exponent = 255u32 - code;
    let half = exponent >> 1;
    let nan = code == 255;
    let first = select(nan, 0x7fc0_0000u32, (half + 63u32) << 23);
    let second = select(nan, 0x7fc0_0000u32, (exponent - half + 63u32) << 23);
    (f32::reinterpret(first), f32::reinterpret(second))
}
