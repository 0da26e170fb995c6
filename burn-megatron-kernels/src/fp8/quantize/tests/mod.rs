use burn::tensor::{DType, Device, Tensor, TensorData, bf16, f16};
use proptest::prelude::*;

use super::*;
use crate::fp8::{BLOCK, Scales};
use crate::testing::devices;

mod activated;
mod recipes;
mod refusals;

mod scales;
pub(crate) mod transcription;

pub(crate) use refusals::message;
use transcription::Copy;

/// All kinds of scaling. The first takes a given scale.
const KINDS: [ScalingKind; 6] = [
    ScalingKind::Tensor,
    ScalingKind::Mx,
    blocks(false, true),
    blocks(false, false),
    blocks(true, true),
    blocks(true, false),
];

const fn blocks(square: bool, power_of_two: bool) -> ScalingKind {
    ScalingKind::Blocks {
        square,
        power_of_two,
    }
}

const FORMATS: [Format; 2] = [Format::E4M3, Format::E5M2];
const USAGES: [QuantizerUsage; 3] = [
    QuantizerUsage::BOTH,
    QuantizerUsage::ROWWISE,
    QuantizerUsage::COLUMNWISE,
];
const SIZES: [usize; 10] = [0, 1, 7, 31, 32, 33, 127, 128, 129, 1000];

/// A matrix whose values are rounded to its type.
#[derive(Clone, Debug)]
struct Case {
    sizes: [usize; 2],
    /// Values of `dtype`.
    values: Vec<f32>,
    dtype: DType,
}

impl Case {
    fn new(sizes: [usize; 2], dtype: DType, value: impl Fn(usize) -> f32) -> Self {
        let round = |value: f32| match dtype {
            DType::F16 => f16::from_f32(value).to_f32(),
            DType::BF16 => bf16::from_f32(value).to_f32(),
            _ => value,
        };
        let values = (0..sizes[0] * sizes[1]).map(|at| round(value(at)));
        Self {
            sizes,
            values: values.collect(),
            dtype,
        }
    }

    /// Returns values of both signs over several powers of two, and zeros.
    fn ordinary(sizes: [usize; 2], dtype: DType) -> Self {
        Self::new(sizes, dtype, |at| {
            let draw = noise(at);
            let power = [1.0, 8.0, 0.03, 300.0][draw as usize % 4];
            let value = (draw >> 8) as f32 / (1 << 23) as f32 - 1.0;
            if draw.is_multiple_of(29) {
                0.0
            } else {
                value * power
            }
        })
    }

    /// Returns blocks that are all zero, subnormal, tiny or huge. Some blocks have infinities or NaN.
    fn extreme(sizes: [usize; 2], dtype: DType) -> Self {
        let columns = sizes[1].max(1);
        Self::new(sizes, dtype, |at| {
            let (row, column) = (at / columns, at % columns);
            let draw = noise(at);
            let sign = if draw & 1 == 0 { 1.0 } else { -1.0 };
            let part = (draw >> 8) as f32 / (1 << 24) as f32;
            sign * match (row / 32 + column / 32 * 3) % 8 {
                0 => 0.0,
                // Subnormal numbers, and some numbers slightly above them.
                1 => f32::from_bits(draw >> 8),
                2 => f32::from_bits(draw >> 9),
                3 => part * 1e-37,
                4 => f32::MAX * part,
                5 if draw % 601 < 4 => f32::INFINITY,
                6 if draw % 701 < 2 => f32::NAN,
                7 if draw.is_multiple_of(97) => f32::MAX,
                _ => part * 10.0,
            }
        })
    }

    fn tensor(&self, device: &Device) -> Tensor<2> {
        let data = TensorData::new(self.values.clone(), self.sizes);
        Tensor::from_data(data.convert_dtype(self.dtype), (device, self.dtype))
    }

    fn expected(
        &self,
        format: Format,
        kind: ScalingKind,
        given: f32,
        usage: QuantizerUsage,
    ) -> Expected {
        let [rows, columns] = self.sizes;
        let row = |row: usize, at: usize| self.values[row * columns + at];
        let column = |row: usize, at: usize| self.values[at * columns + row];
        let rowwise = transcription::copy(&row, self.sizes, format, kind, given);
        let columnwise = transcription::copy(&column, [columns, rows], format, kind, given);
        let beyond = match (usage.rowwise, usage.columnwise) {
            (true, _) => rowwise.1,
            (false, true) => columnwise.1,
            (false, false) => 0,
        };
        let amax = transcription::largest(self.values.iter().copied());
        Expected {
            rowwise: usage.rowwise.then_some(rowwise.0),
            columnwise: usage.columnwise.then_some(columnwise.0),
            seen: vec![bits(amax), (beyond as f32).to_bits()],
        }
    }
}

fn noise(at: usize) -> u32 {
    let mut word = (at as u32).wrapping_mul(0x9e37_79b9) ^ 0x7f4a_7c15;
    for _ in 0..2 {
        word ^= word >> 16;
        word = word.wrapping_mul(0x21f0_aaad);
        word ^= word >> 15;
    }
    word
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Expected {
    rowwise: Option<Copy>,
    columnwise: Option<Copy>,
    seen: Vec<u32>,
}

/// Returns the bits of a float. All NaNs have the same bits.
fn bits(value: f32) -> u32 {
    if value.is_nan() {
        0x7fc0_0000
    } else {
        value.to_bits()
    }
}

fn floats<const D: usize>(tensor: &Tensor<D>) -> Vec<f32> {
    tensor.to_data().try_into_vec().expect("f32")
}

/// Returns codes and scales of a matrix as bits.
pub(crate) fn parts(matrix: &Fp8Matrix) -> Copy {
    let words = |tensor: &Tensor<2, burn::tensor::Int>| {
        let data = tensor.to_data();
        data.try_into_vec::<u32>().expect("codes are u32")
    };
    let bits = |scales: Vec<f32>| scales.into_iter().map(bits).collect();
    Copy {
        codes: words(&matrix.codes),
        scales: match &matrix.scales {
            Scales::Tensor(scale) => bits(floats(scale)),
            Scales::Blocks { scales, .. } => bits(floats(scales)),
            Scales::Mx(scales) => words(scales),
        },
    }
}

fn scaling(kind: ScalingKind, given: f32, device: &Device) -> Scaling {
    match kind {
        ScalingKind::Tensor => Scaling::Tensor(Tensor::from_floats([given], device)),
        ScalingKind::Blocks {
            square,
            power_of_two,
        } => Scaling::Blocks {
            square,
            power_of_two,
        },
        ScalingKind::Mx => Scaling::Mx,
    }
}

/// Asserts that the codes, scales, statistics and dequantized values match the transcription.
fn check(
    case: &Case,
    device: &Device,
    format: Format,
    kind: ScalingKind,
    given: f32,
    usage: QuantizerUsage,
) {
    let scaling = scaling(kind, given, device);
    let quantized = quantize(case.tensor(device), format, &scaling, usage);
    let seen: Vec<u32> = floats(&quantized.seen).into_iter().map(bits).collect();
    let actual = Expected {
        rowwise: quantized.rowwise.as_ref().map(parts),
        columnwise: quantized.columnwise.as_ref().map(parts),
        seen,
    };
    let expected = case.expected(format, kind, given, usage);
    let what = format!(
        "{:?} in {:?} to {format:?} by {kind:?}, {usage:?} on {device:?}",
        case.sizes, case.dtype
    );
    assert_same(&what, &expected, &actual);

    let [rows, columns] = case.sizes;
    let copies = [
        (quantized.rowwise, expected.rowwise, [rows, columns]),
        (quantized.columnwise, expected.columnwise, [columns, rows]),
    ];
    for (copy, expected, sizes) in copies {
        let Some((copy, expected)) = copy.zip(expected) else {
            continue;
        };
        assert_eq!([copy.rows(), copy.depth], sizes);
        let values = floats(&dequantize(&copy));
        let expected = transcription::values(&expected, sizes, format, kind);
        for (at, (value, expected)) in values.iter().zip(&expected).enumerate() {
            // Devices may flush subnormal values to zero. No other difference is allowed.
            let lost = *device != Device::flex() && *value == 0.0 && expected.is_subnormal();
            assert!(
                bits(*value) == bits(*expected) || lost,
                "{what}: value {at} is {value:e} and should be {expected:e}"
            );
        }
    }
}

fn assert_same(what: &str, expected: &Expected, actual: &Expected) {
    let none = Copy {
        codes: vec![],
        scales: vec![],
    };
    let copies = [
        ("rowwise", &expected.rowwise, &actual.rowwise),
        ("columnwise", &expected.columnwise, &actual.columnwise),
    ];
    for (name, expected, actual) in copies {
        assert_eq!(expected.is_some(), actual.is_some(), "{what}: {name}");
        let [expected, actual] = [expected, actual].map(|copy| copy.as_ref().unwrap_or(&none));
        assert_words(
            &format!("{what}: {name} scale"),
            &expected.scales,
            &actual.scales,
        );
        assert_words(
            &format!("{what}: {name} codes"),
            &expected.codes,
            &actual.codes,
        );
    }
    assert_words(&format!("{what}: seen"), &expected.seen, &actual.seen);
}

fn assert_words(what: &str, expected: &[u32], actual: &[u32]) {
    assert_eq!(expected.len(), actual.len(), "{what}: length");
    let differs = expected.iter().zip(actual).position(|(e, a)| e != a);
    if let Some(at) = differs {
        panic!(
            "{what}: word {at} is {:08x} and should be {:08x}",
            actual[at], expected[at]
        );
    }
}

/// Runs `work` with each kind of reduction that the device supports.
fn with_reductions(device: &Device, work: impl Fn()) {
    if *device == Device::flex() {
        return work();
    }
    #[cfg(not(feature = "cubecl"))]
    unreachable!("without CubeCL the CPU is the only device");
    #[cfg(feature = "cubecl")]
    {
        use crate::cube::{Reduction, with_reduction};
        with_reduction(Reduction::Planes, &work);
        with_reduction(Reduction::Shared, &work);
    }
}

#[test]
fn every_size_and_scaling_is_the_transcription_bit_for_bit_on_the_cpu() {
    let device = Device::flex();
    let all = [DType::F32, DType::F16, DType::BF16, DType::F64];
    for (i, rows) in SIZES.into_iter().enumerate() {
        for (j, columns) in SIZES.into_iter().enumerate() {
            let sizes = [rows, columns];
            for (k, kind) in KINDS.into_iter().enumerate() {
                let turn = i + j * 3 + k;
                let (format, dtype) = (FORMATS[turn % 2], all[turn % 4]);
                // For large matrices only one usage is tested, because the transcription is slow.
                let usages = if rows * columns > 40_000 {
                    &USAGES[..1]
                } else {
                    &USAGES
                };
                for usage in usages.iter().copied() {
                    check(
                        &Case::ordinary(sizes, dtype),
                        &device,
                        format,
                        kind,
                        0.7,
                        usage,
                    );
                    check(
                        &Case::extreme(sizes, dtype),
                        &device,
                        format,
                        kind,
                        0.7,
                        usage,
                    );
                }
            }
        }
    }
}

#[test]
fn every_size_and_scaling_is_the_transcription_bit_for_bit_on_devices() {
    for (device, has) in devices().into_iter().skip(1) {
        for (i, rows) in SIZES.into_iter().enumerate() {
            for (j, columns) in SIZES.into_iter().enumerate() {
                for (k, kind) in KINDS.into_iter().enumerate() {
                    let turn = i + j + k;
                    // These cases use kernels of one type and format. The next test covers the other kernels.
                    let case = match turn % 2 {
                        0 => Case::ordinary([rows, columns], has[0]),
                        _ => Case::extreme([rows, columns], has[0]),
                    };
                    check(
                        &case,
                        &device,
                        Format::E4M3,
                        kind,
                        0.7,
                        QuantizerUsage::BOTH,
                    );
                }
            }
        }
    }
}

#[test]
fn every_kernel_is_the_transcription_bit_for_bit_with_both_reductions() {
    for (device, has) in devices() {
        for dtype in has {
            for (k, kind) in KINDS.into_iter().enumerate() {
                for (w, usage) in USAGES.into_iter().enumerate() {
                    // The sizes cycle through loads of all widths and both formats.
                    let sizes = [[160, 264], [131, 35], [70, 130]][(k + w) % 3];
                    let format = FORMATS[(k / 3 + w) % 2];
                    with_reductions(&device, || {
                        let case = Case::extreme(sizes, dtype);
                        check(&case, &device, format, kind, 3.0, usage);
                    });
                }
            }
        }
    }
}

#[cfg(feature = "cubecl")]
#[test]
fn the_forms_for_cuda_are_the_transcription_too() {
    for (device, has) in devices().into_iter().skip(1) {
        for (k, kind) in KINDS.into_iter().enumerate() {
            let case = Case::ordinary([[140, 136], [40, 70]][k % 2], has[0]);
            kernel::with_cuda_forms(|| {
                check(
                    &case,
                    &device,
                    Format::E4M3,
                    kind,
                    3.0,
                    QuantizerUsage::BOTH,
                );
            });
        }
        // The case has one NaN, and a block that ends inside a word.
        let case = Case::new([6, 70], has[0], |at| if at == 69 { f32::NAN } else { 2.5 });
        kernel::with_cuda_forms(|| {
            check(
                &case,
                &device,
                Format::E4M3,
                ScalingKind::Mx,
                1.0,
                QuantizerUsage::BOTH,
            );
        });
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let case = Case::extreme([700, 900], DType::F32);
    let run = |threads: usize, kind: ScalingKind| {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        pool.install(|| {
            check(
                &case,
                &Device::flex(),
                Format::E4M3,
                kind,
                2.0,
                QuantizerUsage::BOTH,
            )
        });
    };
    for kind in KINDS {
        run(1, kind);
        run(3, kind);
    }
}

#[test]
fn views_are_read_as_they_are() {
    for (device, _) in devices() {
        let case = Case::ordinary([96, 160], DType::F32);
        let turned = Case::new([160, 96], DType::F32, |at| {
            case.values[at % 96 * 160 + at / 96]
        });
        let quantized = |x| quantize(x, Format::E4M3, &Scaling::Mx, QuantizerUsage::BOTH);
        let one = quantized(case.tensor(&device).transpose());
        let other = quantized(turned.tensor(&device));
        let both = [one, other].map(|quantized| parts(&quantized.rowwise.unwrap()));
        assert_eq!(both[0], both[1]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn any_shape_is_the_transcription(
        rows in 0usize..300,
        columns in 0usize..300,
        (kind, format, usage) in (0usize..6, 0usize..2, 0usize..3),
        given in prop::sample::select(vec![1e-20f32, 0.1, 1.0, 448.0, 1e20]),
        extreme in any::<bool>(),
    ) {
        let device = Device::flex();
        let all = [DType::F32, DType::F16, DType::BF16];
        let dtype = all[(rows + columns) % 3];
        let case = if extreme { Case::extreme([rows, columns], dtype)
 } else { Case::ordinary([rows, columns], dtype)
 };
        check(&case, &device, FORMATS[format], KINDS[kind], given, USAGES[usage]);
        // On other devices, the test runs only the kernels of one type, one format and both copies.
        for (device, _) in devices().into_iter().skip(1) {
            let case = Case::new([rows, columns], DType::F32, |at| case.values[at]);
            check(&case, &device, Format::E4M3, KINDS[kind], given, QuantizerUsage::BOTH);
        }
    }
}
