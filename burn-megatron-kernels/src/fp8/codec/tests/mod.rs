use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData, bf16, f16};
use proptest::prelude::*;

use super::*;
use crate::cpu::ROW_GRAIN;
use crate::testing::devices;
use fixture::Fixture;

mod fixture;
mod refused;
mod scalar;

const FORMATS: [Format; 3] = [Format::E4M3, Format::E5M2, Format::E2M1];

fn known(format: Format) -> Fixture {
    Fixture::parse(match format {
        Format::E4M3 => include_str!("../../../../tests/fixtures/fp8/e4m3.txt"),
        Format::E5M2 => include_str!("../../../../tests/fixtures/fp8/e5m2.txt"),
        Format::E2M1 => include_str!("../../../../tests/fixtures/fp8/e2m1.txt"),
    })
}

fn known_scales() -> Fixture {
    Fixture::parse(include_str!("../../../../tests/fixtures/fp8/e8m0.txt"))
}

/// Returns all codings. Each coding has its fixture and the column of its codes in the fixture.
fn codings() -> Vec<(Coding, Fixture, usize)> {
    let values = FORMATS.map(|format| (Coding::Value(format), known(format), 0));
    let scales = [(Rounding::Nearest, 0), (Rounding::Up, 1)];
    let scales = scales.map(|(rounding, column)| (Coding::Scale(rounding), known_scales(), column));
    values.into_iter().chain(scales).collect()
}

/// Returns a tensor from bit patterns of f32, f16 or bf16.
fn bits(values: Vec<u32>, dtype: DType, device: &Device) -> Tensor<1> {
    let shape = [values.len()];
    let halves = values.iter().map(|bits| *bits as u16);
    let data = match dtype {
        DType::F16 => TensorData::new(halves.map(f16::from_bits).collect::<Vec<_>>(), shape),
        DType::BF16 => TensorData::new(halves.map(bf16::from_bits).collect::<Vec<_>>(), shape),
        _ => {
            let values = values.into_iter().map(f32::from_bits);
            TensorData::new(values.collect::<Vec<_>>(), shape)
        }
    };
    Tensor::from_data(data, (device, dtype))
}

fn floats(values: &[f32], device: &Device) -> Tensor<1> {
    let values = values.iter().map(|value| value.to_bits()).collect();
    bits(values, DType::F32, device)
}

fn words(tensor: Tensor<1, Int>) -> Vec<u32> {
    assert_eq!(tensor.dtype(), DType::U32);
    tensor.into_data().try_into_vec().expect("words are u32")
}

fn integers(words: Vec<u32>, device: &Device) -> Tensor<1, Int> {
    let shape = [words.len()];
    Tensor::from_data(TensorData::new(words, shape), (device, DType::U32))
}

/// Returns the words that hold these codes.
fn packed(coding: Coding, codes: &[u8]) -> Vec<u32> {
    let bits = coding.bits() as usize;
    let mut words = vec![0; codes.len().div_ceil(32 / bits)];
    for (at, code) in codes.iter().enumerate() {
        words[at * bits / 32] |= u32::from(*code) << (at * bits % 32);
    }
    words
}

/// Returns the bits of a tensor's values. In 16-bit types, all NaNs have the same bits.
fn bits_of(tensor: Tensor<1>) -> Vec<u32> {
    let half = |nan: bool, bits: u16| if nan { u32::MAX } else { u32::from(bits) };
    match tensor.dtype() {
        DType::F16 => {
            let values: Vec<f16> = tensor.into_data().try_into_vec().expect("f16");
            values
                .iter()
                .map(|x| half(x.is_nan(), x.to_bits()))
                .collect()
        }
        DType::BF16 => {
            let values: Vec<bf16> = tensor.into_data().try_into_vec().expect("bf16");
            values
                .iter()
                .map(|x| half(x.is_nan(), x.to_bits()))
                .collect()
        }
        _ => {
            let values: Vec<f32> = tensor.into_data().try_into_vec().expect("f32");
            values.iter().map(|x| x.to_bits()).collect()
        }
    }
}

fn assert_same(what: &str, actual: &[u32], expected: &[u32]) {
    assert_eq!(actual.len(), expected.len(), "{what}: lengths");
    for (at, (actual, expected)) in actual.iter().zip(expected).enumerate() {
        assert_eq!(
            actual, expected,
            "{what}: word {at} is {actual:#010x} and should be {expected:#010x}"
        );
    }
}

/// Returns each device with each of its 32-bit and 16-bit types.
fn devices_with_types() -> Vec<(Device, DType)> {
    let each = |(device, has): (Device, Vec<DType>)| {
        let narrow = has.into_iter().filter(|dtype| *dtype != DType::F64);
        narrow
            .map(move |dtype| (device.clone(), dtype))
            .collect::<Vec<_>>()
    };
    devices().into_iter().flat_map(each).collect()
}

#[test]
fn tensors_have_the_codes_of_other_implementations() {
    for (device, _) in devices() {
        for (coding, known, column) in codings() {
            let codes = known.codes(column);
            // Sign bits and NaN are encoded too.
            let encoded = encode_as(floats(&known.values(), &device), coding);
            let what = format!("{coding:?} on {device:?}");
            assert_same(&what, &words(encoded), &packed(coding, &codes));
        }
    }
}

#[test]
fn tensors_have_the_values_of_other_implementations() {
    for (device, dtype) in devices_with_types() {
        for (coding, known, _) in codings() {
            // 2^-127 is subnormal in bf16, and f16 cannot represent most scales.
            if dtype != DType::F32 && matches!(coding, Coding::Scale(_)) {
                continue;
            }
            let count = known.decode.len();
            let codes: Vec<u8> = (0..count).map(|code| code as u8).collect();
            let codes = integers(packed(coding, &codes), &device);
            let values = decode_as(codes, count, FloatDType::from(dtype), coding);
            assert_eq!(values.dtype(), dtype);
            let expected = floats_in(dtype, &known.decode);
            assert_eq!(
                bits_of(values),
                expected,
                "{coding:?} in {dtype:?} on {device:?}"
            );
        }
    }
}

/// Returns the bits of f32 values converted to `dtype`, as [`bits_of`] returns them.
fn floats_in(dtype: DType, values: &[u32]) -> Vec<u32> {
    let tensor = bits(values.to_vec(), DType::F32, &Device::flex());
    let exact: Vec<u32> = bits_of(tensor.clone().cast(FloatDType::from(dtype)));
    if dtype != DType::F32 {
        let back = bits_of(bits(exact.clone(), dtype, &Device::flex()).cast(FloatDType::F32));
        let same = |(a, b): (&u32, &u32)| a == b || f32::from_bits(*a).is_nan();
        assert!(
            values.iter().zip(&back).all(same),
            "{dtype:?} holds all values"
        );
    }
    exact
}

#[test]
fn every_value_of_16_bits_has_the_code_of_the_same_f32() {
    let all: Vec<u32> = (0..=u32::from(u16::MAX)).collect();
    for (device, dtype) in devices_with_types() {
        let wide = |bits: &u32| match dtype {
            DType::F16 => f16::from_bits(*bits as u16).to_f32(),
            _ => bf16::from_bits(*bits as u16).to_f32(),
        };
        if dtype == DType::F32 {
            continue;
        }
        for (coding, ..) in codings() {
            let codes: Vec<u8> = all.iter().map(|bits| coding.encode(wide(bits))).collect();
            let encoded = words(encode_as(bits(all.clone(), dtype, &device), coding));
            let what = format!("{coding:?} of {dtype:?} on {device:?}");
            assert_same(&what, &encoded, &packed(coding, &codes));
        }
    }
}

/// Returns `count` values with all exponents and both signs. Adjacent values differ.
fn spread(count: usize) -> Vec<f32> {
    let value = |at: usize| {
        let random = (at as u32).wrapping_mul(0x9E37_79B9) ^ 0x1234_5678;
        let exponent = 100 + random % 48;
        f32::from_bits(random & 0x8000_0000 | exponent << 23 | random >> 9 & 0x007f_ffff)
    };
    (0..count).map(value).collect()
}

#[test]
fn any_count_of_values_round_trips_as_single_values_do() {
    let counts = (0..=40).chain([255, 256, 1000, 1024, 4099, 2 * ROW_GRAIN, 2 * ROW_GRAIN + 5]);
    for count in counts {
        let values = spread(count);
        for (device, _) in devices() {
            for (coding, ..) in codings() {
                let what = format!("{count} of {coding:?} on {device:?}");
                let codes: Vec<u8> = values.iter().map(|value| coding.encode(*value)).collect();
                let encoded = encode_as(floats(&values, &device), coding);
                assert_same(&what, &words(encoded.clone()), &packed(coding, &codes));
                let decoded = codes.iter().map(|code| coding.decode(*code).to_bits());
                let expected: Vec<u32> = decoded.collect();
                // All values are decoded, and then fewer values than there are codes.
                for count in [count, count / 3] {
                    let decoded = decode_as(encoded.clone(), count, FloatDType::F32, coding);
                    assert_same(&what, &bits_of(decoded), &expected[..count]);
                }
            }
        }
    }
}

#[test]
fn f64_is_rounded_to_f32_first_and_decoded_exactly() {
    let device = Device::flex();
    let values = [1.0625, 1.062_500_000_000_1, -3.3, 1e300, f64::NAN];
    let tensor = Tensor::<1>::from_data(TensorData::from(values), (&device, DType::F64));
    let codes = encode(tensor, Format::E4M3);
    let single = values.map(|value| Format::E4M3.encode(value as f32));
    assert_eq!(
        words(codes.clone()),
        packed(Coding::Value(Format::E4M3), &single)
    );
    let decoded = decode(codes, 4, Format::E4M3, FloatDType::F64);
    let decoded: Vec<f64> = decoded.into_data().try_into_vec().unwrap();
    assert_eq!(decoded, [1.0, 1.0, -3.25, 448.0]);
}

#[test]
fn values_may_have_any_strides() {
    for (device, _) in devices() {
        let values = spread(240);
        let table = floats(&values, &device).reshape([60, 4]);
        let column: Tensor<1> = table.clone().narrow(1, 2, 1).squeeze_dim(1);
        let part = floats(&values, &device).narrow(0, 7, 33);
        let turned = table.transpose().reshape([240]);
        for (tensor, index) in [
            (column, (0..60).map(|row| 4 * row + 2).collect::<Vec<_>>()),
            (part, (7..40).collect()),
            (turned, (0..240).map(|at| at % 60 * 4 + at / 60).collect()),
        ] {
            let picked: Vec<f32> = index.iter().map(|at| values[*at]).collect();
            for (coding, ..) in codings() {
                let codes: Vec<u8> = picked.iter().map(|value| coding.encode(*value)).collect();
                let encoded = words(encode_as(tensor.clone(), coding));
                assert_eq!(encoded, packed(coding, &codes), "{coding:?} on {device:?}");
            }
        }
        // The memory after the last value is not 0.
        for count in 24..40 {
            let part = floats(&values, &device).narrow(0, 0, count);
            for (coding, ..) in codings() {
                let codes = values[..count].iter().map(|value| coding.encode(*value));
                let codes: Vec<u8> = codes.collect();
                let encoded = words(encode_as(part.clone(), coding));
                let what = format!("{count} of {coding:?} on {device:?}");
                assert_same(&what, &encoded, &packed(coding, &codes));
            }
        }
        // These codes are a slice of a tensor of codes.
        let codes = encode(floats(&values, &device), Format::E4M3).narrow(0, 3, 5);
        let decoded = bits_of(decode(codes, 18, Format::E4M3, FloatDType::F32));
        let expected = values[12..30]
            .iter()
            .map(|value| Format::E4M3.encode(*value));
        let expected: Vec<_> = expected
            .map(|code| Format::E4M3.decode(code).to_bits())
            .collect();
        assert_eq!(decoded, expected);
    }
}

proptest! {
    #[test]
    fn any_values_agree_with_the_scalar_form(values in prop::collection::vec(any::<u32>(), 0..70)) {
        let values: Vec<f32> = values.into_iter().map(f32::from_bits).collect();
        for (coding, ..) in codings() {
            let codes: Vec<u8> = values.iter().map(|value| coding.encode(*value)).collect();
            let encoded = words(encode_as(floats(&values, &Device::flex()), coding));
            prop_assert_eq!(encoded, packed(coding, &codes));
        }
    }
}
