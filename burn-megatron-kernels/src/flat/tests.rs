use burn::tensor::{DType, Device, Tensor, TensorData};
use insta::{allow_duplicates, assert_snapshot};
use proptest::prelude::*;

use super::*;
use crate::testing::{Input, devices};

fn wave(length: usize, phase: f64, device: &Device, dtype: DType) -> Tensor<1> {
    let values = Input::wave([length], phase).values;
    let data = TensorData::new(values, [length]).convert_dtype(dtype);
    Tensor::from_data(data, (device, dtype))
}

/// Returns the pairs of buffer type and value type that a device supports.
fn pairs(has: &[DType]) -> Vec<[DType; 2]> {
    let all = [
        [DType::F64, DType::F64],
        [DType::F32, DType::F32],
        [DType::F32, DType::F16],
        [DType::F32, DType::BF16],
        [DType::F16, DType::F16],
        [DType::BF16, DType::BF16],
    ];
    let taken = |pair: &[DType; 2]| pair.iter().all(|dtype| has.contains(dtype));
    all.into_iter().filter(taken).collect()
}

/// Returns the sum in f64, rounded to the type of the buffer. If the sum of two values is computed in a sufficiently
/// wide type and rounded once, the result is the nearest value.
fn exact(flat: &Tensor<1>, offset: usize, values: &Tensor<1>, add: bool) -> TensorData {
    let double = |tensor: &Tensor<1>| {
        let data = tensor.clone().into_data().convert_dtype(DType::F64);
        Tensor::<1>::from_data(data, (&Device::flex(), DType::F64))
    };
    let sum = composed::accumulate(double(flat), offset, double(values), add);
    sum.into_data().convert_dtype(flat.dtype())
}

/// Each case has a buffer length, an offset and a count. The cases include empty and complete ranges, unaligned ranges,
/// and several tasks.
const STRETCHES: [[usize; 3]; 11] = [
    [0, 0, 0],
    [5, 5, 0],
    [1, 0, 1],
    [7, 3, 4],
    [64, 0, 64],
    [100, 33, 61],
    [100, 32, 61],
    [130, 64, 66],
    [4096, 1024, 2048],
    [4096, 1, 4095],
    [300_000, 4097, 270_001],
];

#[test]
fn every_pair_of_types_and_range_agrees_with_the_composition_in_f64() {
    for (device, has) in devices() {
        for [own, dtype] in pairs(&has) {
            for [length, offset, count] in STRETCHES {
                for add in [false, true] {
                    let flat = || wave(length, 0.2, &device, own);
                    let values = wave(count, 0.7, &device, dtype);
                    let expected = exact(&flat(), offset, &values, add);
                    let composed = composed::accumulate(flat(), offset, values.clone(), add);
                    composed.into_data().assert_eq(&expected, true);
                    let ours = accumulate(flat(), offset, values, add);
                    assert_eq!(ours.dtype(), own);
                    ours.into_data().assert_eq(&expected, true);
                }
            }
        }
    }
}

#[test]
fn values_and_buffers_may_have_any_strides() {
    for (device, _) in devices() {
        let table: Tensor<2> = wave(60 * 4, 0.4, &device, DType::F32).reshape([60, 4]);
        let column = table.clone().narrow(1, 2, 1).squeeze_dim::<1>(1);
        let expanded = wave(1, 0.4, &device, DType::F32).expand([60]);
        let turned = table.clone().transpose().reshape([240]);
        let row = table.narrow(0, 7, 1).squeeze_dim::<1>(0);
        let flipped = wave(60, 0.3, &device, DType::F32).flip([0]);
        let stepped = wave(120, 0.3, &device, DType::F32).slice(burn::tensor::s![0..120;2]);
        for values in [column, expanded, turned, row, flipped, stepped] {
            for offset in [0, 3, 64] {
                let flat = wave(320, 0.1, &device, DType::F32);
                let expected = exact(&flat, offset, &values, true);
                let sum = accumulate(flat, offset, values.clone(), true);
                sum.into_data().assert_eq(&expected, true);
                // A view of a larger buffer, and a view with gaps.
                let large = wave(700, 0.1, &device, DType::F32);
                let [view, gaps] = [
                    large.clone().slice(64..384),
                    large.clone().slice(burn::tensor::s![0..640;2]),
                ];
                let before = large.clone().into_data();
                for flat in [view, gaps] {
                    let expected = exact(&flat, offset, &values, false);
                    let written = accumulate(flat, offset, values.clone(), false);
                    written.into_data().assert_eq(&expected, true);
                }
                large.into_data().assert_eq(&before, true);
            }
        }
    }
}

#[test]
fn a_buffer_of_somebody_else_is_left_alone_and_an_own_one_is_written_to() {
    for (device, _) in devices() {
        let held = wave(100, 0.1, &device, DType::F32);
        let before = held.clone().into_data();
        let values = wave(40, 0.3, &device, DType::F32);
        let expected = exact(&held, 30, &values, true);
        let sum = accumulate(held.clone(), 30, values, true);
        sum.into_data().assert_eq(&expected, true);
        held.clone().into_data().assert_eq(&before, true);
        // The values are a slice of the buffer, so the buffer is shared.
        let values = held.clone().narrow(0, 0, 64);
        let expected = exact(&held, 1, &values, true);
        let sum = accumulate(held, 1, values, true);
        sum.into_data().assert_eq(&expected, true);
    }
    let place = |tensor: Tensor<1>| {
        let flex = tensor.try_into_primitive::<burn::backend::Flex>();
        flex.expect("the tensor is on Flex").bytes().as_ptr() as usize
    };
    let device = Device::flex();
    for add in [false, true] {
        let flat = wave(100, 0.1, &device, DType::F32);
        let values = wave(40, 0.3, &device, DType::BF16);
        let expected = exact(&flat, 7, &values, add);
        let before = place(flat.clone());
        let sum = accumulate(flat, 7, values, add);
        sum.clone().into_data().assert_eq(&expected, true);
        assert_eq!(place(sum), before);
    }
}

#[test]
fn what_is_written_over_is_not_read() {
    for (device, has) in devices() {
        for [own, dtype] in pairs(&has) {
            let flat = Tensor::<1>::full([70], f64::NAN, (&device, own));
            let flat = accumulate(flat, 5, wave(60, 0.2, &device, dtype), false);
            let data = flat.into_data().convert_dtype(DType::F64);
            let values: Vec<f64> = data.try_into_vec().expect("converted to f64");
            let bad = |part: &[f64]| part.iter().filter(|x| x.is_nan()).count();
            assert_eq!(
                [&values[..5], &values[5..65], &values[65..]].map(bad),
                [5, 0, 5]
            );
        }
    }
}

fn message(work: impl FnOnce()) -> String {
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
    let panic = panic.expect_err("the call must fail");
    let text = panic.downcast_ref::<String>().cloned();
    text.expect("the panic has a message")
}

#[test]
fn what_does_not_fit_is_named_on_every_device() {
    allow_duplicates!(for (device, _) in devices() {
        let zeros = |length, dtype| Tensor::<1>::zeros([length], (&device, dtype));
        let call = |own, offset, dtype| {
            message(|| drop(accumulate(zeros(10, own), offset, zeros(4, dtype), true)))
        };
        assert_snapshot!(
            call(DType::F32, 7, DType::F32),
            @"accumulate: 4 elements from element 7 on reach past a flat buffer of 10: expected at least 11"
        );
        assert_eq!(
            call(DType::F32, usize::MAX, DType::F32),
            format!(
                "accumulate: 4 elements from element {0} on reach past a flat buffer of 10: expected at least {0}",
                usize::MAX
            )
        );
        assert_snapshot!(
            call(DType::F16, 0, DType::F32),
            @"accumulate: invalid type of the values = F32 with a flat buffer in F16: expected F16"
        );
    });
    let flex = Device::flex();
    let zeros = |dtype| Tensor::<1>::zeros([4], (&flex, dtype));
    for (own, dtype, fits) in [
        (DType::F32, DType::F64, "F32, F16 or BF16"),
        (DType::F64, DType::F32, "F64"),
        (DType::BF16, DType::F16, "BF16"),
    ] {
        assert_eq!(
            message(|| drop(accumulate(zeros(own), 0, zeros(dtype), false))),
            format!(
                "accumulate: invalid type of the values = {dtype:?} with a flat buffer in {own:?}: expected {fits}"
            )
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn any_stretch_agrees(
        before in 0usize..200,
        count in 0usize..200,
        after in 0usize..200,
        kind in 0usize..6,
        add in any::<bool>(),
    ) {
        let device = Device::flex();
        let all = [DType::F64, DType::F32, DType::F16, DType::BF16];
        let [own, dtype] = pairs(&all)[kind];
        let flat = wave(before + count + after, 0.3, &device, own);
        let values = wave(count, 0.8, &device, dtype);
        let expected = exact(&flat, before, &values, add);
        accumulate(flat, before, values, add).into_data().assert_eq(&expected, true);
    }
}

#[test]
fn ranges_are_cleared_and_nothing_else() {
    for (device, has) in devices() {
        for own in has {
            // A vector with one range is intended here.
            #[allow(clippy::single_range_in_vec_init)]
            let cases = [
                vec![],
                vec![3..3],
                vec![0..1],
                vec![0..64, 64..70, 100..300],
                vec![8..16, 1000..1064, 40_000..49_120],
                vec![3..9001, 49_999..50_000],
            ];
            for ranges in cases {
                let flat = wave(50_000, 0.2, &device, own);
                let data = flat.clone().into_data().convert_dtype(DType::F64);
                let mut expected: Vec<f64> = data.try_into_vec().expect("converted to f64");
                for range in &ranges {
                    expected[range.clone()].fill(0.0);
                }
                let expected = TensorData::new(expected, [50_000]).convert_dtype(own);
                let ranges = Ranges::new(ranges, &device);
                // In the first call the buffer is shared, in the second call it is not.
                let cleared = clear(flat.clone(), &ranges);
                cleared.into_data().assert_eq(&expected, true);
                clear(flat, &ranges).into_data().assert_eq(&expected, true);
            }
        }
    }
}

#[test]
fn a_range_past_the_end_is_not_cleared() {
    allow_duplicates!(for (device, _) in devices() {
        let ranges = Ranges::new([0..4, 8..12], &device);
        let call = || drop(clear(wave(11, 0.2, &device, DType::F32), &ranges));
        assert_snapshot!(
            message(call),
            @"clear: 4 elements from element 8 on reach past a flat buffer of 11: expected at least 12"
        );
    });
}

/// The cases are odd and even sizes, and several tasks. A factor of 1 does not change a bit.
#[test]
fn a_product_with_any_factor_is_rounded_once() {
    for (device, has) in devices() {
        for own in has {
            let factor_type = wide(own);
            for factor in [1.0, -0.75, 1024.0, 1e-3, 0.0] {
                for length in [0, 1, 7, 4096, 150_001] {
                    let x = wave(length, 0.3, &device, own);
                    let factor = Tensor::<1>::full([1], factor, (&device, factor_type));
                    let product = x.clone().cast(factor_type) * factor.clone();
                    let expected = product.cast(own).into_data();
                    let before = x.clone().into_data();
                    scale(x.clone(), factor.clone())
                        .into_data()
                        .assert_eq(&expected, false);
                    // The shared tensor is not modified. In the second call no other tensor shares the memory, so the
                    // tensor is overwritten.
                    x.clone().into_data().assert_eq(&before, true);
                    scale(x, factor).into_data().assert_eq(&expected, true);
                }
            }
            // NaN stays NaN, and a NaN factor is not treated as 1.
            for (value, factor) in [(f64::NAN, 1.0), (2.0, f64::NAN)] {
                let x = Tensor::<2>::full([3, 5], value, (&device, own)).transpose();
                let factor = Tensor::full([1], factor, (&device, factor_type));
                let product = scale(x, factor);
                assert_eq!(product.dims(), [5, 3]);
                let data = product.into_data().convert_dtype(DType::F64);
                let product: Vec<f64> = data.try_into_vec().expect("converted to f64");
                assert!(product.iter().all(|x| x.is_nan()), "{own:?}: {product:?}");
            }
        }
    }
}

#[test]
fn a_factor_of_another_size_or_type_is_refused() {
    allow_duplicates!(for (device, _) in devices() {
        let call = |count, dtype| {
            let factor = Tensor::<1>::ones([count], (&device, dtype));
            message(|| drop(scale(wave(4, 0.2, &device, DType::F32), factor)))
        };
        assert_snapshot!(call(2, DType::F32), @"scale: a factor of shape [2]: expected [1]");
        assert_snapshot!(
            call(1, DType::F16),
            @"scale: invalid type of the factor = F16 with x in F32: expected F32, or F64 for F64"
        );
    });
}
