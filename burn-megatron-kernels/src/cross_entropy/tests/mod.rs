use burn::tensor::{DType, Device, Int, IntDType, Tensor, TensorData};
use insta::assert_snapshot;

use super::*;
use crate::testing::{Input, assert_gradients, compare, compare_within, devices, evaluate};

mod at_once;
mod split;

fn options(label_smoothing: f64, z_loss: f64, ignore: Option<i64>) -> CrossEntropyOptions {
    CrossEntropyOptions {
        label_smoothing,
        z_loss,
        ignore,
    }
}

fn ints(values: &[i64], device: &Device) -> Tensor<1, Int> {
    Tensor::from_data(TensorData::from(values), device)
}

/// Returns targets spread over the vocabulary, including its first and last token.
fn spread(rows: usize, tokens: usize) -> Vec<i64> {
    let token = |row| match row % 3 {
        0 => (row * 7919 + tokens / 2) % tokens,
        1 => tokens - 1 - row % tokens.min(3),
        _ => row / 3 % tokens,
    };
    (0..rows).map(|row| token(row) as i64).collect()
}

type Loss = fn(Tensor<2>, Tensor<1, Int>, &CrossEntropyOptions) -> Tensor<1>;

/// Returns a loss as an operation on flat logits, for the test harness.
fn flat(
    loss: Loss,
    width: usize,
    targets: &[i64],
    options: &CrossEntropyOptions,
) -> impl Fn(&[Tensor<1>]) -> Tensor<1> {
    move |leaves| {
        let logits = leaves[0].clone().reshape([-1, width as i32]);
        let targets = ints(targets, &logits.device());
        loss(logits, targets, options)
    }
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    let data = tensor.into_data().convert_dtype(DType::F64);
    data.try_into_vec().expect("converted to f64")
}

fn tensor(values: &[f64], width: usize, options: (&Device, DType)) -> Tensor<2> {
    let shape = [values.len() / width, width];
    Tensor::from_data(TensorData::new(values.to_vec(), shape), options)
}

#[test]
fn every_width_agrees_with_the_composition() {
    let options = options(0.1, 1e-3, None);
    // With eight rows, rows of an odd width are read in vectors. With three rows, they are not.
    for (rows, width) in [
        (3, 1),
        (8, 1),
        (3, 7),
        (8, 7),
        (8, 33),
        (4, 50),
        (3, 1000),
        (2, 4097),
    ] {
        let targets = spread(rows, width);
        // With a single token, the gradient `1 + 2 z lse - 1` consists only of the small z-loss term.
        let factor = if width == 1 { 30.0 } else { 1.0 };
        compare_within(
            factor,
            &format!("cross entropy [{rows}, {width}]"),
            &[Input::wave([rows, width], 0.2)],
            flat(cross_entropy, width, &targets, &options),
            flat(composed::cross_entropy, width, &targets, &options),
        );
    }
}

#[test]
fn wide_rows_go_through_the_loop_of_many_loads() {
    let options = options(0.0, 0.0, None);
    for width in [20_000, 16_391] {
        let targets = spread(1, width);
        // The maximum grows from left to right, so the sums are rescaled again and again.
        let mut input = Input::wave([1, width], 0.4);
        let rise = input.values.iter().enumerate();
        input.values = rise
            .map(|(i, x)| x + 4.0 * i as f64 / width as f64)
            .collect();
        compare(
            &format!("cross entropy [1, {width}]"),
            &[input],
            flat(cross_entropy, width, &targets, &options),
            flat(composed::cross_entropy, width, &targets, &options),
        );
    }
}

#[test]
fn each_option_agrees_with_the_composition() {
    let targets = [3, -100, 0, 12, -100, 7, 7, 1];
    for options in [
        options(0.0, 0.0, Some(-100)),
        options(0.9, 0.0, Some(7)),
        options(0.0, 0.5, Some(-100)),
        options(0.2, 0.01, Some(i64::MIN)),
    ] {
        // In the last case, -100 is an invalid target.
        compare(
            &format!("cross entropy with {options:?}"),
            &[Input::wave([8, 13], 0.3)],
            flat(cross_entropy, 13, &targets, &options),
            flat(composed::cross_entropy, 13, &targets, &options),
        );
    }
}

#[test]
fn gradients_are_those_of_differences() {
    for options in [
        options(0.0, 0.0, None),
        options(0.3, 0.0, None),
        options(0.0, 0.2, None),
        options(0.1, 0.05, Some(2)),
    ] {
        let targets = spread(4, 9);
        assert_gradients(
            &format!("cross entropy with {options:?}"),
            &[Input::wave([4, 9], 0.6)],
            flat(cross_entropy, 9, &targets, &options),
        );
    }
}

#[test]
fn the_composition_is_the_formula() {
    let (e, z) = (0.2f64, 0.1f64);
    let logits = [0.5f64, -1.0, 2.0];
    let lse = logits.iter().map(|x| x.exp()).sum::<f64>().ln();
    let s = e * 3.0 / 2.0;
    let expected = (1.0 - s) * (lse - 2.0) + s * (lse - 0.5) + z * lse * lse;
    let device = Device::flex();
    let logits = tensor(&logits, 3, (&device, DType::F64));
    let loss = composed::cross_entropy(logits, ints(&[2], &device), &options(e, z, None));
    assert!((values(loss)[0] - expected).abs() < 1e-14);
}

#[test]
fn strided_and_sliced_logits_and_targets_are_taken() {
    let inputs = [Input::wave([20, 24], 0.1)];
    let cut = |loss: Loss| {
        move |leaves: &[Tensor<1>]| {
            let logits = leaves[0].clone().reshape([20, 24]).transpose();
            let logits = logits.narrow(1, 2, 9).narrow(0, 3, 8);
            let targets = ints(&spread(16, 9), &logits.device());
            let targets = targets
                .reshape([8, 2])
                .transpose()
                .narrow(0, 1, 1)
                .reshape([8]);
            loss(logits, targets, &options(0.1, 0.0, None))
        }
    };
    compare(
        "strided",
        &inputs,
        cut(cross_entropy),
        cut(composed::cross_entropy),
    );
}

#[test]
fn no_rows_have_no_loss() {
    for (device, _) in devices() {
        let device = device.autodiff();
        let logits = Tensor::<2>::zeros([0, 5], &device).require_grad();
        let targets = Tensor::<1, Int>::zeros([0], &device);
        let loss = cross_entropy(logits.clone(), targets, &Default::default());
        assert_eq!(loss.dims(), [0]);
        let gradients = loss.sum().backward();
        assert_eq!(logits.grad(&gradients).map(|g| g.dims()), Some([0, 5]));
    }
}

#[test]
fn the_loss_of_16_bit_logits_is_in_f32() {
    for (device, dtypes) in devices() {
        for dtype in dtypes {
            let logits = tensor(&[0.0, 1.0, 2.0], 3, (&device, dtype));
            let loss = cross_entropy(logits, ints(&[1], &device), &Default::default());
            assert_eq!(loss.dtype(), wide(dtype));
        }
    }
}

/// Returns the loss and the gradient of each row, from logits rounded to `dtype`.
fn loss_and_gradient(
    logits: &[f64],
    width: usize,
    targets: &[i64],
    dtype: DType,
    device: &Device,
) -> (Vec<f64>, Vec<f64>) {
    let logits = Input {
        shape: vec![logits.len() / width, width],
        values: logits.to_vec(),
    };
    let options = options(0.0, 0.0, Some(-1));
    let operation = flat(cross_entropy, width, targets, &options);
    let result = evaluate(&[logits], device, dtype, dtype, &operation);
    (result.output, result.gradients[0].clone())
}

#[test]
fn extreme_logits_do_not_overflow() {
    let rows = [
        [1e4, 1e4, 1e4, 1e4],
        [-1e4, -1e4, -1e4, -1e4],
        [6e4, -4e4, -4e4, 6e4],
        [65504.0, -65504.0, 0.0, 65504.0],
    ];
    let expected = [4f64.ln(), 4f64.ln(), 1e5 + 2f64.ln(), 131008.0 + 2f64.ln()];
    for (device, dtypes) in devices() {
        // These values are exact in all types except bf16.
        for dtype in dtypes.into_iter().filter(|dtype| *dtype != DType::BF16) {
            let targets = [0, 3, 1, 1];
            let (loss, gradient) =
                loss_and_gradient(rows.as_flattened(), 4, &targets, dtype, &device);
            for (loss, expected) in loss.iter().zip(expected) {
                assert!(
                    (loss - expected).abs() <= 1e-6 * expected,
                    "{dtype:?}: {loss}"
                );
            }
            assert!(
                gradient.iter().all(|x| x.is_finite()),
                "{dtype:?}: {gradient:?}"
            );
        }
    }
}

#[test]
fn large_logits_lose_no_more_than_their_own_precision() {
    // In f32, the difference from a log-sum-exp of 1e3 has 24 - 10 bits of precision.
    let targets = spread(8, 40);
    let options = options(0.1, 0.0, None);
    compare_within(
        100.0,
        "cross entropy at 1000",
        &[Input::wave([8, 40], 0.2).scaled(1.0, 1000.0)],
        flat(cross_entropy, 40, &targets, &options),
        flat(composed::cross_entropy, 40, &targets, &options),
    );
}

#[test]
fn what_is_not_finite_stays_in_its_row() {
    const NAN: f64 = f64::NAN;
    const INF: f64 = f64::INFINITY;
    let rows = [
        [1.0, NAN, 0.0, 2.0],
        [1.0, INF, 0.0, 2.0],
        [-INF, -INF, -INF, -INF],
        [-INF, 0.0, 0.0, -INF],
        [NAN, NAN, INF, NAN],
        [0.0, 0.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 0.0],
    ];
    let targets = [0, 0, 1, 1, -1, 4, 2];
    // WebGPU implementations may ignore NaN, so only the CPU and CUDA guarantee this result.
    let (device, dtypes) = devices().remove(0);
    for dtype in dtypes {
        let (loss, gradient) = loss_and_gradient(rows.as_flattened(), 4, &targets, dtype, &device);
        let nan: Vec<_> = loss.iter().map(|x| x.is_nan()).collect();
        assert_eq!(
            nan,
            [true, true, true, false, false, true, false],
            "{loss:?}"
        );
        assert!((loss[3] - 2f64.ln()).abs() < 1e-6);
        assert_eq!(loss[4], 0.0);
        let rows: Vec<_> = gradient.chunks(4).collect();
        for row in [0, 1, 2, 5] {
            assert!(
                rows[row].iter().all(|x| x.is_nan()),
                "{row}: {:?}",
                rows[row]
            );
        }
        assert_eq!([rows[3][0], rows[3][3]], [0.0, 0.0]);
        assert_eq!(rows[4], [0.0; 4]);
        assert!(rows[6].iter().all(|x| x.is_finite()));
    }
}

#[test]
fn ignored_rows_are_zero_and_faults_are_nan_on_every_device() {
    let targets = [-1, 5, 2, -1, 1 << 20, -7];
    for (device, dtypes) in devices() {
        for dtype in dtypes {
            let logits = Input::wave([6, 5], 0.1).values;
            let (loss, gradient) = loss_and_gradient(&logits, 5, &targets, dtype, &device);
            for (row, target) in targets.iter().enumerate() {
                let all = || gradient[row * 5..][..5].iter().chain(&loss[row..=row]);
                match target {
                    -1 => assert!(all().all(|x| *x == 0.0)),
                    2 => assert!(all().all(|x| x.is_finite() && *x != 0.0)),
                    _ => assert!(all().all(|x| x.is_nan())),
                }
            }
        }
    }
}

#[test]
fn all_rows_may_be_ignored() {
    for (device, _) in devices() {
        let logits = Input::wave([9, 33], 0.1).values;
        let (loss, gradient) = loss_and_gradient(&logits, 33, &[-1; 9], DType::F32, &device);
        assert!(loss.iter().chain(&gradient).all(|x| *x == 0.0));
    }
}

#[test]
fn targets_of_every_integer_type_are_taken() {
    use IntDType::{I8, I16, I32, I64, U8, U16, U32, U64};
    for (device, _) in devices() {
        let logits = tensor(&Input::wave([4, 90], 0.1).values, 90, (&device, DType::F32));
        let targets = ints(&[3, 89, 0, 41], &device);
        let loss = |targets| values(cross_entropy(logits.clone(), targets, &Default::default()));
        let expected = loss(targets.clone());
        for dtype in [I8, I16, I32, I64, U8, U16, U32, U64] {
            if device.supports_dtype(DType::from(dtype)) {
                assert_eq!(loss(targets.clone().cast(dtype)), expected, "{dtype:?}");
            }
        }
    }
}

#[test]
fn many_rows_are_spread_over_the_grid() {
    for (device, _) in devices() {
        let rows = 70_000;
        // The logits are created on the host, because Burn's fusion stacks more than 65 535 rows incorrectly.
        let ramp = (0..rows).map(|row| row as f64 / rows as f64);
        let logits: Vec<f64> = ramp.flat_map(|x| [x, -x]).collect();
        let logits = tensor(&logits, 2, (&device, DType::F32));
        let targets = Tensor::<1, Int>::zeros([rows], &device);
        let loss = values(cross_entropy(logits, targets, &Default::default()));
        for (row, loss) in loss.iter().enumerate() {
            let expected = (-2.0 * row as f64 / rows as f64).exp().ln_1p();
            assert!((loss - expected).abs() < 1e-6, "{row}: {loss}");
        }
    }
}

/// Returns the message that `work` panics with.
fn message<T>(work: impl FnOnce() -> T) -> String {
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
    let payload = caught.err().expect("the call must fail");
    payload
        .downcast_ref::<String>()
        .cloned()
        .unwrap_or_default()
}

#[test]
fn what_does_not_fit_is_refused_in_words() {
    insta::allow_duplicates!(for (device, _) in devices() {
        let on = (&device, DType::F32);
        let logits = || tensor(&[0.0; 12], 4, on);
        let targets = || ints(&[0, 1, 2], &device);
        let row = |count: usize| Tensor::<1>::ones([count], on);
        let plain = CrossEntropyOptions::default();
        let part = VocabularyShard {
            first: 0,
            tokens: 4,
        };

        let two = || ints(&[0, 1], &device);
        assert_snapshot!(
            message(|| cross_entropy(logits(), two(), &plain)),
            @"cross_entropy: logits [3, 4] have 3 rows, targets [2] are 2: expected one target for each \
              row"
        );
        let none = Tensor::<2>::zeros([3, 0], on);
        assert_snapshot!(
            message(|| cross_entropy(none, targets(), &plain)),
            @"cross_entropy: logits [3, 0] have 0 columns: expected 1 to 2147483647"
        );
        for (wrong, text) in [
            (
                options(1.0, 0.0, None),
                "cross_entropy: invalid label_smoothing = 1: expected 0 up to, but not including, \
                 1",
            ),
            (
                options(0.0, -1.0, None),
                "cross_entropy: invalid z_loss = -1: expected 0 or more",
            ),
        ] {
            assert_eq!(message(|| cross_entropy(logits(), targets(), &wrong)), text);
        }
        let empty = VocabularyShard {
            first: 0,
            tokens: 0,
        };
        assert_snapshot!(
            message(|| statistics(logits(), targets(), &empty)),
            @"cross_entropy: invalid tokens = 0: expected 1 to 2147483647"
        );
        let three = Tensor::<3>::zeros([1, 3, 3], on);
        assert_snapshot!(
            message(|| combine(three, targets(), 4, &plain)),
            @"cross_entropy: statistics [1, 3, 3] for targets [3]: expected [parts, 3, 4] with 1 part or more"
        );
        assert_snapshot!(
            message(|| gradient(logits(), targets(), row(3), row(2), &part, &plain)),
            @"cross_entropy: logits [3, 4] with a log-sum-exp [3] and a gradient [2]: expected [3] for both"
        );
        let half = row(3).cast(DType::F16);
        let text = message(|| gradient(logits(), targets(), row(3), half, &part, &plain));
        assert!(
            text.starts_with("cross_entropy does not support F16 on")
                && text.ends_with(": expected statistics in F32"),
            "{text}"
        );
    });
}
