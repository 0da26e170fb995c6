//! Tests of matrix multiplications that are written into a flat buffer.

use insta::assert_snapshot;

use super::*;

/// The number of elements in the buffer after the result.
const BEHIND: usize = 5;

fn vector(count: usize, phase: f64, device: &Device, dtype: DType) -> Tensor<1> {
    row(count, phase, device, dtype)
}

/// Asserts that the range has approximately the expected values, as [`assert_near`] does, and that all other elements
/// are unchanged.
fn assert_stretch(
    what: &str,
    actual: Tensor<1>,
    expected: Tensor<1>,
    [offset, count]: [usize; 2],
    tolerance: f64,
) {
    let [length] = expected.dims();
    assert_eq!(actual.dims(), [length], "{what}");
    let stretch = |flat: &Tensor<1>| flat.clone().narrow(0, offset, count).reshape([1, count]);
    assert_near(what, stretch(&actual), stretch(&expected), tolerance);
    let (actual, expected) = (doubles(actual), doubles(expected));
    assert_eq!(actual[..offset], expected[..offset], "{what}");
    assert_eq!(
        actual[offset + count..],
        expected[offset + count..],
        "{what}"
    );
}

#[test]
fn products_go_to_any_offset_in_every_type() {
    let flex = Device::flex();
    for (device, dtypes) in devices() {
        for dtype in dtypes {
            let own = wide(dtype);
            for [rows, inputs, outputs] in SIZES {
                let count = inputs * outputs;
                for (offset, add) in [(0, true), (0, false), (3, true), (4, false), (64, true)] {
                    let flat = |device: &Device| vector(offset + count + BEHIND, 0.8, device, own);
                    let x = |device: &Device| matrix([rows, inputs], 0.1, device, dtype);
                    let gradient = |device: &Device| matrix([rows, outputs], 0.5, device, dtype);
                    let double = |x: Tensor<2>| x.cast(DType::F64);
                    let expected = composed::accumulate_weight_gradient_at(
                        double(x(&flex)),
                        double(gradient(&flex)),
                        flat(&flex).cast(DType::F64),
                        offset,
                        add,
                    );
                    let what = format!(
                        "{dtype:?} [{rows}, {inputs}, {outputs}] at {offset}, {add}, on {device:?}"
                    );
                    let forms = [
                        (x(&device), gradient(&device)),
                        (turned(x(&device)), framed(gradient(&device))),
                    ];
                    for (x, gradient) in forms {
                        let sum =
                            accumulate_weight_gradient_at(x, gradient, flat(&device), offset, add);
                        assert_eq!(sum.dtype(), own);
                        let stretch = [offset, count];
                        // Sums are in f32 for all element types except f64.
                        assert_stretch(&what, sum, expected.clone(), stretch, tolerance(own));
                    }
                }
            }
        }
    }
}

#[test]
fn the_bits_do_not_depend_on_the_offset_or_on_the_form() {
    for (device, _) in devices() {
        #[cfg(feature = "cuda")]
        if device == Device::cuda(0) {
            println!("left out on CUDA: cuBLASLt may sum in another order for another problem");
            continue;
        }
        let x = matrix([70, 33], 0.1, &device, DType::F32);
        let gradient = matrix([70, 20], 0.5, &device, DType::F32);
        let before = matrix([33, 20], 0.3, &device, DType::F32);
        let expected = accumulate_weight_gradient(x.clone(), gradient.clone(), before.clone());
        let expected = expected.reshape([660]).into_data();
        for offset in [0, 1, 4, 64] {
            let flat = vector(offset + 660 + BEHIND, 0.8, &device, DType::F32);
            let flat = flat.slice_assign(offset..offset + 660, before.clone().reshape([660]));
            let (x, gradient) = (x.clone(), gradient.clone());
            let sum = accumulate_weight_gradient_at(x, gradient, flat, offset, true);
            let sum = sum.slice(offset..offset + 660).into_data();
            sum.assert_eq(&expected, true);
        }
    }
}

#[test]
fn what_is_written_over_is_not_read_and_nothing_sums_to_zeros() {
    for (device, _) in devices() {
        for rows in [0, 9] {
            let x = |device: &Device| matrix([rows, 3], 0.1, device, DType::F32);
            let gradient = |device: &Device| matrix([rows, 4], 0.5, device, DType::F32);
            // The reference is computed on the CPU, because Burn's matmul on a GPU may round the operands to fewer
            // bits.
            let flex = Device::flex();
            let zeros = Tensor::zeros([3, 4], &flex);
            let product = composed::accumulate_weight_gradient(x(&flex), gradient(&flex), zeros);
            for offset in [1, 4] {
                let flat = Tensor::<1>::full([offset + 12 + BEHIND], f32::NAN, &device);
                let (x, gradient) = (x(&device), gradient(&device));
                let flat = accumulate_weight_gradient_at(x, gradient, flat, offset, false);
                let outside = doubles(flat.clone()).iter().filter(|x| x.is_nan()).count();
                assert_eq!(outside, offset + BEHIND);
                let written = flat.slice(offset..offset + 12).reshape([3, 4]);
                assert_near("written over", written, product.clone(), 2e-6);
            }
        }
        let zeros = |sizes| Tensor::<2>::zeros(sizes, &device);
        let flat = || vector(12, 0.2, &device, DType::F32);
        let same = [
            accumulate_weight_gradient_at(zeros([0, 3]), zeros([0, 4]), flat(), 0, true),
            accumulate_weight_gradient_at(zeros([2, 0]), zeros([2, 4]), flat(), 12, false),
            accumulate_weight_gradient_at(zeros([2, 3]), zeros([2, 0]), flat(), 5, true),
        ];
        for sum in same {
            assert_eq!(doubles(sum), doubles(flat()));
        }
    }
}

#[test]
fn a_uniquely_owned_buffer_is_written_in_place_and_a_shared_one_is_copied() {
    let place = |tensor: Tensor<1>| {
        let flex = tensor.try_into_primitive::<burn::backend::Flex>();
        flex.expect("the tensor is on Flex").bytes().as_ptr() as usize
    };
    let flex = Device::flex();
    for dtype in [DType::F32, DType::BF16] {
        for add in [false, true] {
            let flat = Tensor::<1>::ones([200], &flex);
            let before = place(flat.clone());
            let x = matrix([32, 8], 0.1, &flex, dtype);
            let gradient = matrix([32, 16], 0.2, &flex, dtype);
            let sum = accumulate_weight_gradient_at(x, gradient, flat, 33, add);
            assert_eq!(place(sum), before);
        }
    }
    for (device, _) in devices() {
        for offset in [33, 64] {
            let held = Tensor::<1>::ones([200], &device);
            let x = matrix([32, 8], 0.1, &device, DType::F32);
            let gradient = matrix([32, 16], 0.2, &device, DType::F32);
            let sum = accumulate_weight_gradient_at(x, gradient, held.clone(), offset, true);
            let changed = doubles(sum).iter().filter(|x| **x != 1.0).count();
            assert_eq!(changed, 128);
            assert_eq!(doubles(held), [1.0; 200]);
        }
    }
}

#[test]
fn what_does_not_fit_a_flat_buffer_is_named_on_every_device() {
    insta::allow_duplicates!(for (device, _) in devices() {
        let zeros = |sizes| Tensor::<2>::zeros(sizes, &device);
        let flat = || Tensor::<1>::zeros([20], &device);
        let call = |x, gradient, flat, offset| {
            message(|| {
                drop(accumulate_weight_gradient_at(
                    x, gradient, flat, offset, true,
                ))
            })
        };
        assert_snapshot!(
            call(zeros([2, 3]), zeros([4, 5]), flat(), 0),
            @"accumulate_weight_gradient_at: x is [2, 3], the gradient [4, 5]: expected [rows, in] and \
              [rows, out]"
        );
        assert_snapshot!(
            call(zeros([2, 3]), zeros([2, 5]), flat(), 6),
            @"accumulate_weight_gradient_at: 15 elements from element 6 on reach past a flat buffer \
              of 20: expected at least 21"
        );
        let half = |sizes| zeros(sizes).cast(DType::F16);
        assert_snapshot!(
            call(half([2, 3]), zeros([2, 5]), flat(), 0),
            @"accumulate_weight_gradient_at: invalid type of the gradient = F32 with x in F16: expected the type of x"
        );
        assert_snapshot!(
            call(half([2, 3]), half([2, 5]), flat().cast(DType::F16), 0),
            @"accumulate_weight_gradient_at: invalid type of the flat buffer = F16 with x in F16: expected F32, or F64 \
              for F64"
        );
    });
}
