//! Tests of encoding and decoding of single values.

use super::*;

#[test]
fn all_codes_and_cases_are_those_of_other_implementations() {
    for (coding, known, column) in codings() {
        for (code, bits) in known.decode.iter().enumerate() {
            let value = coding.decode(code as u8).to_bits();
            assert_eq!(value, *bits, "{coding:?}: code {code:#x}");
        }
        for (bits, codes) in &known.encode {
            let code = coding.encode(f32::from_bits(*bits));
            assert_eq!(code, codes[column], "{coding:?}: value {bits:#010x}");
        }
    }
}

#[test]
fn the_constants_are_those_of_the_codes() {
    for format in FORMATS {
        assert_eq!(format.decode(format.max_code()), format.max());
        assert_eq!(format.decode(1), format.min_positive());
        let one = format.bias() << format.mantissa_bits();
        assert_eq!(format.decode(one as u8), 1.0);
        assert_eq!(format.encode(f32::NAN), format.nan_code());
        let has_nan = format != Format::E2M1;
        assert_eq!(format.decode(format.nan_code()).is_nan(), has_nan);
    }
    assert!(e8m0::decode(e8m0::NAN).is_nan());
    assert_eq!(e8m0::decode(e8m0::MAX), 2f32.powi(127));
    assert_eq!(f64::from(e8m0::decode(0)), 2f64.powi(-127));
}

#[test]
fn higher_bits_of_a_code_are_ignored() {
    for code in 0..16 {
        let value = Format::E2M1.decode(code);
        (1..16).for_each(|high| assert_eq!(Format::E2M1.decode(high << 4 | code), value));
    }
}

/// In f64, `amax / 448` is precise enough to be compared with powers of two. A quotient that is a power of two is
/// exact, and no other quotient is within 2^-24 of a power of two.
#[test]
fn the_scale_of_a_block_is_its_largest_value_by_448_rounded_up() {
    let exponents = (0..255u32).map(|exponent| exponent << 23);
    let near = [
        0, 1, 2, 0x40_0000, 0x5f_ffff, 0x60_0000, 0x60_0001, 0x7f_ffff,
    ];
    for bits in exponents.flat_map(|exponent| near.map(|mantissa| exponent | mantissa)) {
        let quotient = f64::from(f32::from_bits(bits)) / 448.0;
        let upper = (0..254).find(|code| 2f64.powi(code - 127) >= quotient);
        let expected = upper.unwrap_or(254) as u8;
        assert_eq!(
            e8m0::of_amax(f32::from_bits(bits)),
            expected,
            "{bits:#010x}"
        );
        assert_eq!(
            e8m0::of_amax(-f32::from_bits(bits)),
            expected,
            "{bits:#010x}"
        );
    }
    assert_eq!(e8m0::of_amax(f32::INFINITY), 254);
    assert_eq!(e8m0::of_amax(f32::NAN), e8m0::NAN);
}

/// Returns all finite values of a format in ascending order, each with its code.
fn ladder(format: Format) -> Vec<(f64, u8)> {
    let sign = 1u8 << (format.bits() - 1);
    let codes = (0..=format.max_code()).flat_map(|code| [code, sign | code]);
    let mut all: Vec<_> = codes
        .map(|code| (f64::from(format.decode(code)), code))
        .collect();
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    all
}

fn any_format() -> impl Strategy<Value = Format> {
    prop::sample::select(&FORMATS[..])
}

/// Values with exponents near the range of the formats, and arbitrary bits.
fn any_value() -> impl Strategy<Value = f32> {
    let near =
        (any::<bool>(), 100u32..146, 0u32..1 << 23).prop_map(|(sign, exponent, mantissa)| {
            f32::from_bits(u32::from(sign) << 31 | exponent << 23 | mantissa)
        });
    prop_oneof![near, any::<u32>().prop_map(f32::from_bits)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]

    #[test]
    fn a_code_is_the_nearest_one_of_all(format in any_format(), value in any_value()) {
        prop_assume!(!value.is_nan());
        let bound = f64::from(format.max());
        let wide = f64::from(value).clamp(-bound, bound);
        let ladder = ladder(format);
        let distance = |at: &(f64, u8)| (at.0 - wide).abs();
        let least = ladder.iter().map(distance).fold(f64::INFINITY, f64::min);
        let nearest: Vec<u8> =
            ladder.iter().filter(|at| distance(at) == least).map(|at| at.1).collect();
        let code = format.encode(value);
        prop_assert!(nearest.contains(&code), "{value:e} is {code:#x}, not of {nearest:?}");
        // A tie is rounded to the even code. -0 and 0 count as one value.
        let tie = nearest.iter().any(|near| format.decode(*near) != format.decode(code));
        prop_assert!(!tie || code & 1 == 0, "{value:e} is {code:#x} of {nearest:?}");
    }

    #[test]
    fn a_negative_value_has_the_code_of_the_positive_one(
        format in any_format(),
        value in any_value(),
    ) {
        prop_assume!(!value.is_nan());
        let sign = 1 << (format.bits() - 1);
        prop_assert_eq!(format.encode(-value), format.encode(value) ^ sign);
    }

    #[test]
    fn a_larger_value_has_no_smaller_code(
        format in any_format(),
        a in any_value(),
        b in any_value(),
    ) {
        prop_assume!(!a.is_nan() && !b.is_nan());
        let (low, high) = (a.min(b), a.max(b));
        let decoded = [low, high].map(|value| format.decode(format.encode(value)));
        prop_assert!(decoded[0] <= decoded[1]);
    }

    #[test]
    fn a_scale_is_the_power_of_two_beside_its_value(bits in 1u32 << 23..=254 << 23) {
        let value = f32::from_bits(bits);
        let [near, up] = [Rounding::Nearest, Rounding::Up]
            .map(|rounding| f64::from(e8m0::decode(e8m0::encode(value, rounding))));
        let value = f64::from(value);
        let other = if near > value { near / 2.0 } else { near * 2.0 };
        prop_assert!((near - value).abs() <= (other - value).abs());
        prop_assert!(up >= value && up < 2.0 * value);
    }
}
