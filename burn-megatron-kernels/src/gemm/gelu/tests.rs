//! Compares the multiplication before and the multiplication after GELU with plain loops in f64 on every device.

use burn::tensor::{DType, Device, Tensor, TensorData};
use insta::assert_snapshot;

use super::*;
use crate::testing::{Input, devices};

/// Returns a tensor, and its rounded values in f64.
fn leaf<const D: usize>(
    shape: [usize; D],
    phase: f64,
    factor: f64,
    (device, dtype): (&Device, DType),
) -> (Tensor<D>, Vec<f64>) {
    let values = Input::wave(shape, phase).scaled(factor, 0.0).values;
    let data = TensorData::new(values, shape).convert_dtype(dtype);
    let rounded = data.clone().convert_dtype(DType::F64);
    let rounded = rounded.try_into_vec().expect("converted to f64");
    (Tensor::from_data(data, (device, dtype)), rounded)
}

fn doubles<const D: usize>(tensor: &Tensor<D>) -> Vec<f64> {
    let data = tensor.to_data().convert_dtype(DType::F64);
    data.try_into_vec().expect("converted to f64")
}

/// Returns the matrix product `[rows, depth] [depth, columns]`.
fn product(left: &[f64], right: &[f64], [rows, depth, columns]: [usize; 3]) -> Vec<f64> {
    let element = |index: usize| {
        let (row, column) = (index / columns, index % columns);
        (0..depth)
            .map(|at| left[row * depth + at] * right[at * columns + column])
            .sum()
    };
    (0..rows * columns).map(element).collect()
}

fn inside(x: f64) -> f64 {
    (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)
}

fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + inside(x).tanh())
}

/// Returns the derivative of GELU, computed from the logistic function `s`: GELU is `x s(2 inside)`.
fn slope(x: f64) -> f64 {
    let s = 1.0 / (1.0 + (-2.0 * inside(x)).exp());
    let of_inside = (2.0 / std::f64::consts::PI).sqrt() * (1.0 + 3.0 * 0.044715 * x * x);
    s + 2.0 * x * s * (1.0 - s) * of_inside
}

#[track_caller]
fn assert_near(what: &str, found: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(1e-30f64, |most, x| most.max(x.abs()));
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!(
            (found - expected).abs() <= tolerance * largest,
            "{what}: element {i} is {found} and should be {expected}"
        );
    }
}

/// Returns the tolerance relative to the largest value. It allows for one rounding of the result, and one rounding of
/// the value from which the result is computed.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-13,
        DType::F32 => 4e-6,
        DType::F16 => 1e-3,
        _ => 8e-3,
    }
}

/// The numbers of rows, inputs and features. On CUDA, the first size has no fused epilogue.
const SIZES: [[usize; 3]; 4] = [[3, 5, 7], [1, 8, 16], [65, 24, 40], [100, 70, 128]];

#[test]
fn a_product_gives_gelu_and_its_input() {
    for (device, dtypes) in devices() {
        for dtype in dtypes {
            for sizes @ [rows, inputs, width] in SIZES {
                for with_bias in [false, true] {
                    let on = (&device, dtype);
                    let (x, of_x) = leaf([rows, inputs], 0.1, 0.5, on);
                    let (weight, of_weight) = leaf([inputs, width], 0.5, 0.3, on);
                    let (bias, of_bias) = leaf([width], 0.8, 1.0, on);
                    let mut expected = product(&of_x, &of_weight, sizes);
                    for (at, sum) in expected.iter_mut().enumerate().filter(|_| with_bias) {
                        *sum += of_bias[at % width];
                    }
                    let activated: Vec<_> = expected.iter().copied().map(gelu).collect();
                    let bias = with_bias.then_some(bias);
                    let output = linear_gelu(x, weight, bias);
                    let what = format!("{dtype:?} {sizes:?} {with_bias} on {device:?}");
                    assert_eq!(output.activated.dtype(), dtype);
                    let near = |found: &Tensor<2>, expected: &[f64]| {
                        assert_near(&what, &doubles(found), expected, tolerance(dtype));
                    };
                    near(&output.input, &expected);
                    near(&output.activated, &activated);
                }
            }
        }
    }
}

#[test]
fn gradients_go_through_gelu_to_its_input_and_its_bias() {
    for (device, dtypes) in devices() {
        for dtype in dtypes {
            for sizes @ [rows, outputs, width] in SIZES {
                for with_bias in [false, true] {
                    let on = (&device, dtype);
                    let (dy, of_dy) = leaf([rows, outputs], 0.2, 0.5, on);
                    let (turned, of_turned) = leaf([outputs, width], 0.6, 0.3, on);
                    let (input, of_input) = leaf([rows, width], 0.9, 1.5, on);
                    let mut expected = product(&of_dy, &of_turned, sizes);
                    for (gradient, x) in expected.iter_mut().zip(&of_input) {
                        *gradient *= slope(*x);
                    }
                    // The weight in the layout in which a layer stores it, and the same weight transposed in memory.
                    let held = turned.clone().transpose();
                    let stored = Tensor::<2>::from_data(held.to_data(), (&device, dtype));
                    for weight in [held, stored] {
                        let (dy, input) = (dy.clone(), input.clone());
                        let (found, bias) = gelu_gradient(dy, weight, input, with_bias);
                        let what = format!("{dtype:?} {sizes:?} on {device:?}");
                        assert_near(&what, &doubles(&found), &expected, tolerance(dtype));
                        assert_eq!(bias.is_some(), with_bias);
                        let Some(bias) = bias else { continue };
                        assert_eq!(bias.dtype(), dtype);
                        let column = |column| expected.iter().skip(column).step_by(width);
                        let largest = expected.iter().fold(0.0f64, |most, x| most.max(x.abs()));
                        for (at, found) in doubles(&bias).into_iter().enumerate() {
                            let (sum, size) = column(at)
                                .fold((0.0, 0.0), |(sum, size), x| (sum + x, size + x.abs()));
                            let near = (found - sum).abs() <= tolerance(dtype) * (size + largest);
                            assert!(near, "{what}: {found} instead of {sum}, column {at}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn no_rows_are_no_work() {
    for (device, _) in devices() {
        let zeros = |sizes| Tensor::<2>::zeros(sizes, &device);
        let output = linear_gelu(zeros([0, 4]), zeros([4, 8]), None);
        assert_eq!(output.activated.dims(), [0, 8]);
        let (gradient, bias) = gelu_gradient(zeros([0, 4]), zeros([8, 4]), zeros([0, 8]), true);
        assert_eq!(gradient.dims(), [0, 8]);
        assert_eq!(bias.map(|bias| doubles(&bias)), Some(vec![0.0; 8]));
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let device = Device::flex();
    let zeros = |sizes| Tensor::<2>::zeros(sizes, &device);
    let error = check_gradient(&zeros([2, 3]), &zeros([4, 3]), &zeros([2, 5])).unwrap_err();
    assert_snapshot!(
        error,
        @"gelu_gradient: the gradient is [2, 3], the weight [4, 3], the input [2, 5]: expected [rows, out], [width, out] \
          and [rows, width]"
    );
    let half = zeros([4, 3]).cast(DType::F16);
    let error = check_gradient(&zeros([2, 3]), &half, &zeros([2, 4])).unwrap_err();
    assert_snapshot!(
        error,
        @"gelu_gradient: invalid type of the weight = F16 with x in F32: expected the type of x"
    );
}

#[test]
fn a_device_without_the_epilogues_says_why() {
    let check = |device: &Device, dtype, width| {
        check_gelu_epilogues(device, dtype, [32, width]).map_err(|error| {
            assert!(!error.contains('\n'), "{error}");
            error
        })
    };
    let flex = Device::flex();
    let error = check(&flex, DType::F32, 64).unwrap_err();
    assert!(
        error.starts_with("the fused epilogues require a CUDA device"),
        "{error}"
    );
    let error = check(&flex, DType::F64, 64).unwrap_err();
    assert_snapshot!(error, @"the fused epilogues require F32, F16 or BF16, got F64");
    let error = check(&flex, DType::F32, 60).unwrap_err();
    assert_snapshot!(error, @"the width on a rank is 60: expected a multiple of 8, as 56 or 64");
    #[cfg(feature = "cuda")]
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        assert_eq!(check(&Device::cuda(0), dtype, 64), Ok(()));
    }
}
