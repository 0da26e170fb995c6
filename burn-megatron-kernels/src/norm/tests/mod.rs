use burn::tensor::{DType, Device, Tensor};

use super::{NormKind, NormOptions, add_normalise, layer_norm, rms_norm};
use crate::testing::{Input, assert_gradients, compare, compare_within, devices, evaluate};

mod added;

use added::{add_layer_norm, add_rms_norm, composed};

const OPTIONS: NormOptions = NormOptions {
    epsilon: 1e-5,
    zero_centered: false,
};
const ZERO_CENTERED: NormOptions = NormOptions {
    epsilon: 1e-5,
    zero_centered: true,
};

/// Returns the test inputs: `inputs` tensors of shape `[rows, width]`, the weight and the bias.
fn leaves(rows: usize, width: usize, inputs: usize) -> Vec<Input> {
    let x = (0..inputs).map(|i| Input::wave([rows, width], 0.1 + 0.3 * i as f64));
    let params = (0..2).map(|i| Input::wave([width], 0.55 + 0.1 * i as f64));
    x.chain(params).collect()
}

/// Reshapes a flat test input to `[rows, width]`.
fn rows(leaf: &Tensor<1>, width: usize) -> Tensor<2> {
    leaf.clone().reshape([-1, width as i32])
}

fn flat<const D: usize>(x: Tensor<D>) -> Tensor<1> {
    x.reshape([-1])
}

/// Returns both outputs in the type of the second output. They are scaled so that their gradients differ.
fn both(y: Tensor<2>, sum: Tensor<2>) -> Tensor<1> {
    flat(Tensor::cat(vec![y.cast(sum.dtype()), sum * 1.5], 0))
}

fn width_of(t: &[Tensor<1>]) -> usize {
    t[t.len() - 1].dims()[0]
}

macro_rules! layer {
    ($path:ident $(:: $rest:ident)*, $options:expr) => {
        |t: &[Tensor<1>]| {
            let x = rows(&t[0], width_of(t));
            flat($path$(::$rest)*(x, t[1].clone(), Some(t[2].clone()), $options))
        }
    };
}

macro_rules! rms {
    ($path:ident $(:: $rest:ident)*, $options:expr) => {
        |t: &[Tensor<1>]| flat($path$(::$rest)*(rows(&t[0], width_of(t)), t[1].clone(), $options))
    };
}

macro_rules! add_layer {
    ($path:ident $(:: $rest:ident)*, $options:expr) => {
        |t: &[Tensor<1>]| {
            let (x, residual) = (rows(&t[0], width_of(t)), rows(&t[1], width_of(t)));
            let (w, b) = (t[2].clone(), t[3].clone());
            let (y, sum) = $path$(::$rest)*(x, residual, w, Some(b), $options);
            both(y, sum)
        }
    };
}

macro_rules! add_rms {
    ($path:ident $(:: $rest:ident)*, $options:expr) => {
        |t: &[Tensor<1>]| {
            let (x, residual) = (rows(&t[0], width_of(t)), rows(&t[1], width_of(t)));
            let (y, sum) = $path$(::$rest)*(x, residual, t[2].clone(), $options);
            both(y, sum)
        }
    };
}

mod refusals;
mod x_bias;

const SIZES: [(usize, usize); 6] = [(300, 1), (37, 7), (5, 33), (3, 1000), (3, 2048), (2, 4097)];

#[test]
fn layer_norm_equals_the_composed_one() {
    for (count, width) in SIZES {
        compare(
            "layer_norm",
            &leaves(count, width, 1),
            layer!(layer_norm, OPTIONS),
            layer!(composed::layer_norm, OPTIONS),
        );
    }
}

#[test]
fn rms_norm_equals_the_composed_one() {
    for (count, width) in SIZES {
        compare(
            "rms_norm",
            &leaves(count, width, 1),
            rms!(rms_norm, ZERO_CENTERED),
            rms!(composed::rms_norm, ZERO_CENTERED),
        );
    }
}

#[test]
fn added_norms_equal_the_composed_ones() {
    for (count, width) in SIZES {
        let inputs = leaves(count, width, 2);
        compare(
            "add_layer_norm",
            &inputs,
            add_layer!(add_layer_norm, ZERO_CENTERED),
            add_layer!(composed::add_layer_norm, ZERO_CENTERED),
        );
        compare(
            "add_rms_norm",
            &inputs,
            add_rms!(add_rms_norm, OPTIONS),
            add_rms!(composed::add_rms_norm, OPTIONS),
        );
    }
}

#[test]
fn gradients_are_those_of_differences() {
    let inputs = leaves(3, 9, 1);
    assert_gradients("layer_norm", &inputs, layer!(layer_norm, ZERO_CENTERED));
    assert_gradients("rms_norm", &inputs, rms!(rms_norm, OPTIONS));
    let inputs = leaves(3, 9, 2);
    assert_gradients(
        "add_layer_norm",
        &inputs,
        add_layer!(add_layer_norm, OPTIONS),
    );
    assert_gradients(
        "add_rms_norm",
        &inputs,
        add_rms!(add_rms_norm, ZERO_CENTERED),
    );
}

/// Casts `t` to the type in which it is computed.
fn widened<const D: usize>(t: Tensor<D>) -> Tensor<D> {
    let dtype = crate::cpu::wide(t.dtype());
    t.cast(dtype)
}

#[test]
fn wide_parameters_and_a_wide_residual_are_taken() {
    compare(
        "layer_norm with a wide weight",
        &leaves(5, 40, 1),
        |t| {
            let (w, b) = (widened(t[1].clone()), t[2].clone());
            flat(layer_norm(rows(&t[0], 40), w, Some(b), OPTIONS))
        },
        layer!(composed::layer_norm, OPTIONS),
    );
    // The widths include wide rows, which a GPU kernel reads twice.
    for width in [24, 40_000] {
        compare(
            "add_rms_norm with a wide residual",
            &leaves(3, width, 2),
            |t| {
                let residual = widened(rows(&t[1], width));
                let (y, sum) = add_rms_norm(rows(&t[0], width), residual, t[2].clone(), OPTIONS);
                both(y, sum)
            },
            add_rms!(composed::add_rms_norm, OPTIONS),
        );
    }
    for (device, dtypes) in devices() {
        for dtype in dtypes.into_iter().filter(|dtype| dtype.size() == 2) {
            let device = device.clone().autodiff();
            let x = Tensor::<2>::ones([2, 8], (&device, dtype)).require_grad();
            let residual = Tensor::<2>::ones([2, 8], (&device, DType::F32)).require_grad();
            let weight = Tensor::<1>::ones([8], (&device, DType::F32)).require_grad();
            let (y, sum) = add_rms_norm(x.clone(), residual.clone(), weight.clone(), OPTIONS);
            assert_eq!((y.dtype(), sum.dtype()), (dtype, DType::F32));
            let gradients = (y.cast(DType::F32) + sum).sum().backward();
            assert_eq!(x.grad(&gradients).unwrap().dtype(), dtype);
            assert_eq!(residual.grad(&gradients).unwrap().dtype(), DType::F32);
            assert_eq!(weight.grad(&gradients).unwrap().dtype(), DType::F32);
        }
    }
}

#[test]
fn rows_too_wide_for_registers_are_read_again() {
    for width in [20_000, 33_001] {
        let inputs = leaves(2, width, 2);
        compare(
            "wide add_layer_norm",
            &inputs,
            add_layer!(add_layer_norm, OPTIONS),
            add_layer!(composed::add_layer_norm, OPTIONS),
        );
        compare(
            "wide rms_norm",
            &inputs[1..],
            rms!(rms_norm, OPTIONS),
            rms!(composed::rms_norm, OPTIONS),
        );
    }
}

#[test]
fn strided_and_sliced_inputs_are_taken() {
    let inputs = vec![
        Input::wave([12 * 10], 0.2),
        Input::wave([5], 0.4),
        Input::wave([5], 0.6),
    ];
    fn cut(t: &Tensor<1>) -> Tensor<2> {
        let x = t.clone().reshape([12, 10]).transpose();
        x.narrow(1, 3, 5).narrow(0, 1, 7)
    }
    compare(
        "layer_norm of a slice",
        &inputs,
        |t| {
            flat(layer_norm(
                cut(&t[0]),
                t[1].clone(),
                Some(t[2].clone()),
                OPTIONS,
            ))
        },
        |t| {
            flat(composed::layer_norm(
                cut(&t[0]),
                t[1].clone(),
                Some(t[2].clone()),
                OPTIONS,
            ))
        },
    );
}

#[test]
fn an_empty_batch_has_gradients_of_zero() {
    for (device, _) in devices() {
        let device = device.autodiff();
        let x = Tensor::<3>::zeros([2, 0, 12], &device).require_grad();
        let weight = Tensor::<1>::ones([12], &device).require_grad();
        let bias = Tensor::<1>::ones([12], &device).require_grad();
        let y = layer_norm(x.clone(), weight.clone(), Some(bias.clone()), OPTIONS);
        let (y, sum) = add_layer_norm(y, x.clone(), weight.clone(), Some(bias.clone()), OPTIONS);
        assert_eq!((y.dims(), sum.dims()), ([2, 0, 12], [2, 0, 12]));
        let gradients = (y + sum).sum().backward();
        for param in [weight, bias] {
            let gradient = param.grad(&gradients).unwrap().into_data();
            gradient.assert_eq(&[0.0f32; 12].into(), true);
        }
        assert_eq!(x.grad(&gradients).unwrap().dims(), [2, 0, 12]);
    }
}

/// The test compares f32 on every device with f64. The mean is 1e4 and the standard deviation is 1. A difference of
/// squares would have no correct digit, and one float cannot hold the mean with sufficient precision.
#[test]
fn a_large_mean_loses_nothing() {
    let mut inputs = leaves(4, 1000, 1);
    inputs[0] = inputs[0].clone().scaled(0.7, 1e4);
    let reference = layer!(composed::layer_norm, OPTIONS);
    let expected = evaluate(&inputs, &Device::flex(), DType::F64, DType::F32, &reference);
    for (device, _) in devices() {
        let ours = layer!(layer_norm, OPTIONS);
        let actual = evaluate(&inputs, &device, DType::F32, DType::F32, &ours);
        let mut pairs = vec![(&expected.output, &actual.output)];
        pairs.extend(expected.gradients.iter().zip(&actual.gradients));
        for (i, (expected, actual)) in pairs.into_iter().enumerate() {
            let largest = expected.iter().fold(0.0f64, |most, x| most.max(x.abs()));
            for (expected, actual) in expected.iter().zip(actual) {
                let error = (expected - actual).abs() / largest;
                assert!(error < 2e-6, "{device:?}, {i}: {actual}, not {expected}");
            }
        }
    }
}

#[test]
fn rows_of_zeros_large_values_and_nan_stay_apart() {
    for (device, _) in devices() {
        let device = device.autodiff();
        let values = [[0.0, 0.0], [1e18, -1e18], [f32::NAN, 1.0], [3.0, 4.0]];
        let x = Tensor::<2>::from_floats(values, &device).require_grad();
        let weight = Tensor::<1>::from_floats([2.0, 3.0], &device);
        let y = rms_norm(x.clone(), weight, OPTIONS);
        let data = y.clone().into_data().try_into_vec::<f32>().unwrap();
        let last = [6.0 / 12.5f32.sqrt(), 12.0 / 12.5f32.sqrt()];
        let expected = [0.0, 0.0, 2.0, -3.0, f32::NAN, f32::NAN, last[0], last[1]];
        for (y, expected) in data.into_iter().zip(expected) {
            let same = (y - expected).abs() < 1e-5 || y.is_nan() && expected.is_nan();
            assert!(same, "{device:?}: {y}, not {expected}");
        }
        let gradient = x.grad(&y.sum().backward()).unwrap().into_data();
        let gradient = gradient.try_into_vec::<f32>().unwrap();
        assert!((gradient[0] - 2.0 / 1e-5f32.sqrt()).abs() < 0.01);
        assert!(gradient[4].is_nan() && gradient[6].is_finite());
    }
}

/// Applies three norms in a residual stream. `used` selects the last outputs that enter the loss.
fn stream(t: &[Tensor<1>], used: [bool; 2], fused: bool) -> Tensor<1> {
    let (mut x, mut residual) = (rows(&t[0], 6), rows(&t[1], 6));
    for _ in 0..3 {
        let (w, b) = (t[2].clone(), Some(t[3].clone()));
        let (y, sum) = if fused {
            add_layer_norm(x, residual, w, b, OPTIONS)
        } else {
            composed::add_layer_norm(x, residual, w, b, OPTIONS)
        };
        x = y * 0.5;
        residual = sum;
    }
    match used {
        [true, true] => flat(x * 2.0 + residual),
        [true, false] => flat(x),
        _ => flat(residual),
    }
}

#[test]
fn a_residual_stream_has_the_gradients_of_separate_operations() {
    for used in [[true, true], [true, false], [false, true]] {
        compare_within(
            4.0,
            "a residual stream",
            &leaves(4, 6, 2),
            |t| stream(t, used, true),
            |t| stream(t, used, false),
        );
    }
}

#[test]
fn only_what_is_tracked_has_a_gradient() {
    for (device, _) in devices() {
        let plain = |phase: f64| Input::wave([3, 5], phase).values;
        let of = |device: &Device, phase| {
            let data = burn::tensor::TensorData::new(plain(phase), [3, 5]);
            Tensor::<2>::from_data(data.convert_dtype(DType::F32), device)
        };
        let autodiff = device.clone().autodiff();
        let weight = Tensor::<1>::from_floats([1.0, 2.0, 3.0, 4.0, 5.0], &device);
        let (x, residual) = (of(&device, 0.1), of(&device, 0.3));
        let (y, sum) = add_rms_norm(x.clone(), residual.clone(), weight.clone(), OPTIONS);
        assert!(!y.is_autodiff() && !sum.is_autodiff());
        // Only the weight is tracked.
        let tracked = Tensor::from_inner(weight.clone()).require_grad();
        let (again, sum) = add_rms_norm(x.clone(), residual.clone(), tracked.clone(), OPTIONS);
        assert!(!sum.is_autodiff());
        again
            .clone()
            .inner()
            .into_data()
            .assert_eq(&y.clone().into_data(), true);
        let of_weight = tracked.grad(&again.sum().backward()).unwrap();
        let expected = (y.clone() / weight.clone().unsqueeze())
            .sum_dim(0)
            .flatten::<1>(0, 1);
        let tolerance = burn::tensor::Tolerance::<f32>::rel_abs(1e-5, 1e-5);
        of_weight
            .into_data()
            .assert_approx_eq(&expected.into_data(), tolerance);
        // Only the residual is tracked.
        let residual = of(&autodiff, 0.3).require_grad();
        let (again, sum) = add_rms_norm(x.clone(), residual.clone(), weight.clone(), OPTIONS);
        let ours = residual.grad(&(again + sum).sum().backward()).unwrap();
        let x = Tensor::from_inner(x);
        let weight = Tensor::from_inner(weight);
        let (again, sum) = composed::add_rms_norm(x, residual.clone(), weight, OPTIONS);
        let theirs = residual.grad(&(again + sum).sum().backward()).unwrap();
        ours.into_data()
            .assert_approx_eq(&theirs.into_data(), tolerance);
    }
}
