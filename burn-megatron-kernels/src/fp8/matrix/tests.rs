use burn::tensor::{DType, Device, Tensor, TensorData};
use insta::{allow_duplicates, assert_snapshot};
use proptest::prelude::*;

use super::*;
use crate::fp8::quantize::tests::{message, parts};
use crate::fp8::{QuantizerUsage, Scaling, dequantize, encode, quantize};
use crate::testing::{Input, devices};

const SIZES: [[usize; 2]; 9] = [
    [1, 1],
    [3, 5],
    [16, 16],
    [33, 127],
    [128, 128],
    [129, 257],
    [40, 1000],
    [0, 7],
    [7, 0],
];

fn wave(sizes: [usize; 2], device: &Device) -> Tensor<2> {
    let values = Input::wave(sizes, 0.3).scaled(20.0, 0.0).values;
    let data = TensorData::new(values, sizes).convert_dtype(DType::F32);
    Tensor::from_data(data, device)
}

fn shared(device: &Device) -> [Scaling; 3] {
    let square = |power_of_two| Scaling::Blocks {
        square: true,
        power_of_two,
    };
    let scale = Tensor::from_floats([7.5], device);
    [Scaling::Tensor(scale), square(true), square(false)]
}

#[test]
fn the_transposed_is_the_other_copy() {
    for (device, _) in devices() {
        for sizes in SIZES {
            for scaling in shared(&device) {
                let both = quantize(
                    wave(sizes, &device),
                    Format::E5M2,
                    &scaling,
                    QuantizerUsage::BOTH,
                );
                let (rowwise, columnwise) = (both.rowwise.unwrap(), both.columnwise.unwrap());
                let turned = rowwise.transposed();
                assert_eq!([turned.rows(), turned.depth], [sizes[1], sizes[0]]);
                assert_eq!(parts(&turned), parts(&columnwise), "{sizes:?} {scaling:?}");
                assert_eq!(parts(&turned.transposed()), parts(&rowwise), "{sizes:?}");
            }
        }
    }
}

#[test]
fn scales_of_one_row_cannot_be_transposed() {
    allow_duplicates!(for (device, _) in devices() {
        let refused = |scaling| {
            let x = wave([40, 40], &device);
            let copy = quantize(x, Format::E4M3, &scaling, QuantizerUsage::ROWWISE).rowwise;
            message(|| drop(copy.unwrap().transposed()))
        };
        assert_snapshot!(
            refused(Scaling::Mx),
            @"transposed: invalid scales = one for 1 x 32 elements: expected one for all, or one for \
              128 x 128 elements"
        );
        assert_snapshot!(
            refused(Scaling::Blocks {
                square: false,
                power_of_two: true
            }),
            @"transposed: invalid scales = one for 1 x 128 elements: expected one for all, or one for \
              128 x 128 elements"
        );
    });
}

/// Returns contiguous codes of `x` times a scale. Each rank encodes its own part, and the parts end at word boundaries.
fn flat(x: &Tensor<2>, scale: f32, ranks: usize, format: Format) -> Tensor<1, Int> {
    let count = x.shape().num_elements();
    let x = x.clone().reshape([count]) * scale;
    let part = count.div_ceil(ranks).next_multiple_of(4);
    let parts = (0..count).step_by(part).map(|first| {
        let length = part.min(count - first);
        encode(x.clone().narrow(0, first, length), format)
    });
    Tensor::cat(parts.collect(), 0)
}

fn check_gathered(sizes: [usize; 2], scale: f32, ranks: usize, format: Format, device: &Device) {
    let x = wave(sizes, device);
    let scaling = Scaling::Tensor(Tensor::from_floats([scale], device));
    let whole = quantize(x.clone(), format, &scaling, QuantizerUsage::ROWWISE).rowwise;
    let descale = Tensor::<1>::from_floats([1.0 / scale], device);
    let codes = flat(&x, scale, ranks, format);
    let gathered = Fp8Matrix::from_flat(codes, sizes, descale, format);
    assert_eq!([gathered.rows(), gathered.depth], sizes);
    assert_eq!(parts(&gathered), parts(&whole.unwrap()), "{sizes:?}");
}

#[test]
fn codes_that_ranks_made_of_slices_are_those_of_the_whole() {
    for (device, _) in devices() {
        for sizes in SIZES.into_iter().filter(|sizes| !sizes.contains(&0)) {
            for format in [Format::E4M3, Format::E5M2] {
                for (scale, ranks) in [(1.0, 1), (7.3, 2), (0.01, 3)] {
                    check_gathered(sizes, scale, ranks, format, &device);
                }
            }
        }
        for sizes in [[0, 7], [7, 0]] {
            let codes = Tensor::<1, Int>::zeros([1], (&device, DType::U32));
            let descale = Tensor::<1>::ones([1], &device);
            let empty = Fp8Matrix::from_flat(codes, sizes, descale, Format::E4M3);
            assert_eq!(dequantize(&empty).dims(), sizes);
        }
    }
}

#[test]
fn flat_codes_that_do_not_fit_are_refused() {
    allow_duplicates!(for (device, _) in devices() {
        let call = |words: usize, dtype, scales: usize, format| {
            let codes = Tensor::<1, Int>::zeros([words], (&device, dtype));
            let descale = Tensor::<1>::ones([scales], &device);
            message(|| drop(Fp8Matrix::from_flat(codes, [3, 5], descale, format)))
        };
        assert_snapshot!(
            call(3, DType::U32, 1, Format::E4M3),
            @"from_flat: 3 words hold 12 codes, and [3, 5] has 15: expected 4 words"
        );
        assert_snapshot!(
            call(4, DType::I32, 1, Format::E4M3),
            @"from_flat: invalid type of the codes = I32: expected U32"
        );
        assert_snapshot!(
            call(4, DType::U32, 2, Format::E4M3),
            @"from_flat: the descale is [2]: expected [1]"
        );
        assert_snapshot!(
            call(4, DType::U32, 1, Format::E2M1),
            @"from_flat: invalid format = E2M1: expected E4M3 or E5M2"
        );
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn any_matrix_is_turned_and_gathered(rows in 1usize..200, depth in 1usize..200) {
        for (device, _) in devices() {
            check_gathered([rows, depth], 3.3, 2, Format::E4M3, &device);
            for scaling in shared(&device) {
                let x = wave([rows, depth], &device);
                let both = quantize(x, Format::E4M3, &scaling, QuantizerUsage::BOTH);
                let turned = both.rowwise.unwrap().transposed();
                prop_assert_eq!(parts(&turned), parts(&both.columnwise.unwrap()));
            }
        }
    }
}
