//! Tests the scales for given magnitudes, and the effect of NaN and infinities.

use super::*;
use crate::fp8::{MX_BLOCK, e8m0};

/// Largest magnitudes, with the E8M0 code of the block scale.
const TABLE: [(f32, u8); 22] = [
    (0.0, 0),
    (f32::from_bits(1), 0),
    (f32::from_bits(0x007f_ffff), 0),
    (f32::MIN_POSITIVE, 0),
    (4.0 * f32::MIN_POSITIVE, 0),
    (128.0 * f32::MIN_POSITIVE, 0),
    (1.75 * 128.0 * f32::MIN_POSITIVE, 0),
    (1.875 * 128.0 * f32::MIN_POSITIVE, 1),
    (256.0 * f32::MIN_POSITIVE, 1),
    (0.25, 117),
    (1.0, 119),
    (1.75, 119),
    (1.750_000_1, 120),
    (2.0, 120),
    (256.0, 127),
    (447.0, 127),
    (448.0, 127),
    (449.0, 128),
    (512.0, 128),
    (f32::MAX, 247),
    (f32::INFINITY, 254),
    (f32::NAN, 255),
];

#[test]
fn scales_of_mx_follow_the_table() {
    for (device, _) in devices() {
        with_reductions(&device, || {
            let case = Case::new([TABLE.len(), 40], DType::F32, |at| {
                let (row, column) = (at / 40, at % 40);
                match column {
                    5 => -TABLE[row].0,
                    _ => 0.0,
                }
            });
            let x = case.tensor(&device);
            let copy = quantize(x, Format::E4M3, &Scaling::Mx, QuantizerUsage::ROWWISE);
            let scales = parts(&copy.rowwise.unwrap()).scales;
            for ((amax, code), word) in TABLE.into_iter().zip(scales) {
                // The second block is all zeros. The other two blocks do not exist.
                assert_eq!(word, u32::from(code), "{amax:e} on {device:?}");
            }
        });
    }
    // The scale is the smallest power of two with which no value exceeds the format. With half the scale, the largest
    // value would overflow.
    for (amax, code) in TABLE {
        let fits = |code: u8| f64::from(amax) <= 448.0 * 2f64.powi(i32::from(code) - 127);
        if amax.is_finite() {
            assert!(fits(code) && (code == 0 || !fits(code - 1)), "{amax:e}");
        }
    }
}

#[test]
fn a_nan_takes_its_block_of_mx_and_itself_of_the_others() {
    for (device, _) in devices() {
        let case = Case::new([4, 160], DType::F32, |at| match at {
            200 => f32::NAN,
            _ => 3.0,
        });
        let codes = |kind| {
            let scaling = scaling(kind, 1.0, &device);
            let quantized = quantize(
                case.tensor(&device),
                Format::E4M3,
                &scaling,
                QuantizerUsage::BOTH,
            );
            assert!(floats(&quantized.seen)[0].is_nan());
            let count = |copy: Option<Fp8Matrix>| {
                let words = parts(&copy.unwrap()).codes.into_iter();
                let codes = words.flat_map(u32::to_le_bytes);
                codes.filter(|code| code & 0x7f == 0x7f).count()
            };
            [count(quantized.rowwise), count(quantized.columnwise)]
        };
        assert_eq!(codes(ScalingKind::Mx), [MX_BLOCK, 4]);
        assert_eq!(codes(ScalingKind::Tensor), [1, 1]);
        assert_eq!(codes(blocks(false, true)), [1, 1]);
        assert_eq!(codes(blocks(true, false)), [1, 1]);
    }
}

#[test]
fn the_largest_magnitude_is_exact_on_every_device() {
    for (device, has) in devices() {
        for dtype in has {
            with_reductions(&device, || {
                for sizes in [[0, 3], [1, 1], [7, 33], [64, 64], [300, 1000]] {
                    for case in [Case::ordinary(sizes, dtype), Case::extreme(sizes, dtype)] {
                        let expected = transcription::largest(case.values.iter().copied());
                        let actual = floats(&amax(case.tensor(&device)));
                        assert_eq!(actual.len(), 1);
                        assert_eq!(bits(actual[0]), bits(expected), "{sizes:?} {dtype:?}");
                    }
                }
            });
        }
    }
    // Subnormal numbers count too.
    for (device, _) in devices() {
        let x = Tensor::<2>::from_floats([[f32::from_bits(3), -f32::from_bits(5)]], &device);
        assert_eq!(floats(&amax(x))[0].to_bits(), 5);
    }
}

#[test]
fn the_current_scale_follows_the_formula_on_every_device() {
    let mut magnitudes: Vec<f32> = TABLE.iter().map(|(amax, _)| *amax).collect();
    magnitudes.extend((0..40).map(|at| f32::from_bits(noise(at) >> 1)));
    magnitudes.extend([57_344.0, 60_000.0, 1e-36, 1.32e-36, 3e-38, 1.7e-34, -0.0]);
    // These mantissas are close to the mantissas of the largest values of the formats.
    magnitudes.extend((0..8).map(|at| f32::from_bits(0x3fdf_fffc + at)));
    for (device, _) in devices() {
        for format in FORMATS {
            for power_of_two in [false, true] {
                for epsilon in [0.0, -0.0, 1e-12] {
                    let options = CurrentScale {
                        epsilon,
                        power_of_two,
                    };
                    for amax in &magnitudes {
                        let tensor = Tensor::<1>::from_floats([*amax], &device);
                        let actual = floats(&current_scale(tensor, format, options))[0];
                        let expected = transcription::current(*amax, format, options);
                        assert_eq!(
                            actual.to_bits(),
                            expected.to_bits(),
                            "{amax:e}, {format:?}, {options:?} on {device:?}: {actual:e}, not \
                             {expected:e}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn a_scale_that_would_be_infinite_is_the_largest_float() {
    let tiny = 1e-40f32;
    for (device, _) in devices() {
        let amax = Tensor::<1>::from_floats([tiny], &device);
        let scale = current_scale(amax, Format::E4M3, CurrentScale::default());
        assert_eq!(floats(&scale), [f32::MAX]);
        let x = Tensor::<2>::from_floats([[tiny, -tiny / 4.0]], &device);
        for scaling in [
            Scaling::Tensor(scale),
            scaling(blocks(false, false), 1.0, &device),
        ] {
            let copy = quantize(x.clone(), Format::E4M3, &scaling, QuantizerUsage::ROWWISE).rowwise;
            let copy = parts(&copy.unwrap());
            let codes = [tiny, -tiny / 4.0].map(|v| Format::E4M3.encode(v * f32::MAX));
            assert_ne!(codes[0], 0);
            assert_eq!(
                copy.codes[0],
                u32::from_le_bytes([codes[0], codes[1], 0, 0])
            );
            // The reciprocal is subnormal but not flushed to zero.
            assert_eq!(copy.scales, [(1.0 / f32::MAX).to_bits()]);
        }
    }
}

#[test]
fn one_over_a_scale_is_rounded_once() {
    for (device, _) in devices() {
        let x = Tensor::<2>::zeros([1, 1], &device);
        // Values from 2^125, with arbitrary mantissas.
        let drawn = (0..200).map(|at| 0x7e00_0000 | noise(at) & 0x01ff_ffff);
        let edges = [
            0x7e7f_ffff,
            0x7e80_0000,
            0x7e80_0001,
            0x7f00_0000,
            0x7f7f_ffff,
        ];
        for bits in drawn.chain(edges).filter(|bits| *bits < 0x7f80_0000) {
            let scale = f32::from_bits(bits);
            let given = Scaling::Tensor(Tensor::from_floats([scale], &device));
            let copy = quantize(x.clone(), Format::E5M2, &given, QuantizerUsage::ROWWISE).rowwise;
            assert_eq!(
                parts(&copy.unwrap()).scales,
                [(1.0 / scale).to_bits()],
                "{scale:e}"
            );
        }
    }
}

#[test]
fn scales_of_mx_are_those_of_the_encoder_of_scales() {
    let device = Device::flex();
    let case = Case::ordinary([16, 32], DType::F32);
    let x = case.tensor(&device);
    let copy = quantize(x, Format::E4M3, &Scaling::Mx, QuantizerUsage::ROWWISE);
    for (row, word) in parts(&copy.rowwise.unwrap()).scales.into_iter().enumerate() {
        let amax = transcription::largest(case.values[row * 32..][..32].iter().copied());
        let exact = f64::from(amax) / 448.0;
        let scale = f64::from(e8m0::decode(word as u8));
        assert!(scale >= exact && scale < 2.0 * exact, "row {row}");
    }
}
