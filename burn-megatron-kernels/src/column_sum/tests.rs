use burn::tensor::{DType, Device, Tensor, TensorData};
use insta::assert_snapshot;

use super::*;
use crate::gradient::Place;
use crate::testing::{Input, devices, tolerance};

fn wave<const D: usize>(shape: [usize; D], phase: f64, device: &Device, dtype: DType) -> Tensor<D> {
    let data = TensorData::new(Input::wave(shape.to_vec(), phase).values, shape);
    Tensor::from_data(data.convert_dtype(dtype), (device, dtype))
}

fn doubles<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    let data = x.into_data().convert_dtype(DType::F64);
    data.try_into_vec().expect("converted to f64")
}

/// The numbers of rows and columns. They include zero, one, odd numbers, columns of several cubes, and rows of several
/// strips and terms.
const SIZES: [[usize; 2]; 11] = [
    [0, 5],
    [1, 1],
    [3, 7],
    [33, 96],
    [40, 1000],
    [31, 2304],
    [1000, 8],
    [2049, 33],
    [5000, 24],
    [4096, 288],
    [20_000, 3],
];

/// Returns the sum of each column in f64, and the sum of its magnitudes, which bounds the error.
fn exact(x: &Tensor<2>) -> (Vec<f64>, Vec<f64>) {
    let [rows, columns] = x.dims();
    let values = doubles(x.clone());
    let mut sums = (vec![0.0; columns], vec![0.0; columns]);
    for row in 0..rows {
        for column in 0..columns {
            let value = values[row * columns + column];
            sums.0[column] += value;
            sums.1[column] += value.abs();
        }
    }
    sums
}

fn assert_close(what: &str, actual: &[f64], expected: &[f64], size: &[f64], dtype: DType) {
    let tolerance = tolerance(wide(dtype));
    assert_eq!(actual.len(), expected.len(), "{what}");
    for (i, (actual, expected)) in actual.iter().zip(expected).enumerate() {
        assert!(
            (actual - expected).abs() <= tolerance * (size[i] + 1.0),
            "{what}: sum {i} is {actual} and should be {expected}"
        );
    }
}

#[test]
fn every_type_and_size_agrees_with_the_sum_in_f64() {
    for (device, dtypes) in devices() {
        for dtype in dtypes {
            for [rows, columns] in SIZES {
                let what = format!("[{rows}, {columns}] in {dtype:?} on {device:?}");
                let x = wave([rows, columns], 0.3, &device, dtype);
                let (expected, size) = exact(&x);
                let sum = column_sum(x.clone(), None);
                assert_eq!(sum.dtype(), wide(dtype));
                let alone = sum.clone().into_data();
                assert_close(&what, &doubles(sum), &expected, &size, dtype);
                // A second call and a call with a buffer give the same bits.
                let again = column_sum(x.clone(), None).into_data();
                again.assert_eq(&alone, true);
                let length = columns + 9;
                let flat = || wave([length], 0.8, &device, wide(dtype));
                for add in [false, true] {
                    let place = Place { offset: 5, add };
                    let target = FlatGradients {
                        flat: flat(),
                        places: vec![place],
                    };
                    let written = column_sum(x.clone(), Some(target));
                    let sum = Tensor::from_data(alone.clone(), (&device, wide(dtype)));
                    let other = crate::flat::accumulate(flat(), 5, sum, add);
                    written.into_data().assert_eq(&other.into_data(), true);
                }
            }
        }
    }
}

#[test]
fn the_cpu_adds_rows_in_order() {
    for dtype in [DType::F32, DType::F64] {
        let x = wave([777, 300], 0.3, &Device::flex(), dtype);
        let burn: Tensor<2> = x.clone().sum_dim(0);
        let ours = column_sum(x, None);
        ours.into_data()
            .assert_eq(&burn.squeeze_dim::<1>(0).into_data(), true);
    }
}

#[test]
fn a_buffer_in_16_bits_rounds_once() {
    for (device, dtypes) in devices() {
        for half in [DType::F16, DType::BF16] {
            if !dtypes.contains(&half) {
                continue;
            }
            let x = wave([100, 7], 0.3, &device, DType::F32);
            let sum = doubles(column_sum(x.clone(), None));
            let before = wave([9], 0.1, &device, half);
            let there = doubles(before.clone());
            let place = Place {
                offset: 1,
                add: true,
            };
            let target = FlatGradients {
                flat: before,
                places: vec![place],
            };
            let flat = column_sum(x, Some(target));
            let sums = sum.iter().zip(&there[1..8]);
            let mut expected = there.clone();
            for (to, (sum, there)) in expected[1..8].iter_mut().zip(sums) {
                *to = f64::from((*sum as f32) + (*there as f32));
            }
            let rounded = TensorData::new(expected, [9]).convert_dtype(half);
            flat.into_data().assert_eq(&rounded, true);
        }
    }
}

#[test]
fn strided_rows_are_summed() {
    for (device, _) in devices() {
        let x = wave([60, 50], 0.3, &device, DType::F32).transpose();
        let (expected, size) = exact(&x);
        let sum = doubles(column_sum(x, None));
        assert_close("transposed", &sum, &expected, &size, DType::F32);
    }
}

#[test]
fn a_place_that_does_not_fit_is_refused() {
    let device = Device::flex();
    let call = |length: usize, offset: usize, dtype: DType| {
        let target = FlatGradients {
            flat: Tensor::zeros([length], (&device, dtype)),
            places: vec![Place { offset, add: true }],
        };
        let x = Tensor::<2>::ones([2, 4], &device);
        let work = || column_sum(x, Some(target));
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        let panic = panic.expect_err("the call must fail");
        panic.downcast_ref::<String>().cloned().unwrap()
    };
    assert_snapshot!(
        call(8, 5, DType::F32),
        @"column_sum: 4 elements from element 5 on reach past a flat buffer of 8: expected at least 9"
    );
    assert_snapshot!(
        call(8, 0, DType::F64),
        @"column_sum: invalid type of the flat buffer = F64 with values in F32: expected F32, F16 or BF16, and F64 for \
          F64"
    );
}
