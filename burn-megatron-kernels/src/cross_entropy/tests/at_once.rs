//! Tests that the operation for loss and gradient agrees with the three separate operations.

use super::*;
use crate::cross_entropy::loss_and_gradient;

type Both =
    fn(Tensor<2>, Tensor<1, Int>, Tensor<1>, usize, &CrossEntropyOptions) -> (Tensor<1>, Tensor<2>);

/// Returns the loss and the gradient, computed by the three separate operations.
fn in_parts(
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
    upstream: Tensor<1>,
    tokens: usize,
    options: &CrossEntropyOptions,
) -> (Tensor<1>, Tensor<2>) {
    let part = VocabularyShard { first: 0, tokens };
    let parts = statistics(logits.clone(), targets.clone(), &part).unsqueeze::<3>();
    let (loss, lse) = combine(parts, targets.clone(), tokens, options);
    let gradient = gradient(logits, targets, lse, upstream, &part, options);
    (loss, gradient)
}

#[test]
fn loss_and_gradient_at_once_are_those_of_the_parts() {
    // The cases are complete vectors, a padded last vector, wide rows, and widths that are not a multiple of a vector.
    for (width, tokens) in [(16, 16), (64, 59), (20_480, 20_479), (13, 13), (50, 41)] {
        let rows = 6;
        let mut targets = spread(rows, tokens);
        targets[1] = -1;
        targets[4] = tokens as i64;
        for (device, dtypes) in devices() {
            for dtype in dtypes {
                for options in [options(0.0, 0.0, Some(-1)), options(0.1, 0.01, Some(-1))] {
                    let logits = Input::wave([rows, width], 0.2).scaled(3.0, 0.0).values;
                    let logits = || tensor(&logits, width, (&device, dtype));
                    let number = |row: usize| row as f64 + 2.0;
                    let upstream: Vec<_> = (0..rows).map(number).collect();
                    let on = (&device, wide(dtype));
                    let upstream = || tensor(&upstream, rows, on).reshape([rows]);
                    let run = |run: Both| {
                        let targets = ints(&targets, &device);
                        let (loss, gradient) = run(logits(), targets, upstream(), tokens, &options);
                        [values(loss), values(gradient)].concat()
                    };
                    let (found, expected) = (run(loss_and_gradient), run(in_parts));
                    assert!(expected[0] > 0.0 && expected[1] == 0.0 && expected[4].is_nan());
                    // On a GPU, the compiler may contract the same formula differently.
                    let unit = match dtype {
                        _ if device == Device::flex() => 0.0,
                        DType::BF16 => 2f64.powi(-7),
                        DType::F16 => 2f64.powi(-10),
                        _ => 2f64.powi(-22),
                    };
                    for (i, (a, b)) in found.iter().zip(&expected).enumerate() {
                        let near = (a - b).abs() <= unit * b.abs().max(1.0);
                        let same = near || a.is_nan() && b.is_nan();
                        assert!(same, "[{rows}, {width}] in {dtype:?}, {i}: {a}, not {b}");
                    }
                }
            }
        }
    }
}

#[test]
fn no_rows_and_shared_logits() {
    for (device, _) in devices() {
        let on = (&device, DType::F32);
        let options = CrossEntropyOptions::default();
        let none = Tensor::<2>::zeros([0, 8], on);
        let targets = Tensor::<1, Int>::zeros([0], &device);
        let row = Tensor::<1>::zeros([0], on);
        let (loss, gradient) = loss_and_gradient(none, targets, row, 8, &options);
        assert_eq!((loss.dims(), gradient.dims()), ([0], [0, 8]));

        let logits = tensor(&Input::wave([2, 32], 0.1).values, 32, on);
        let before = values(logits.clone());
        let run = |logits: Tensor<2>| {
            let (targets, ones) = (ints(&[3, 4], &device), Tensor::ones([2], on));
            values(loss_and_gradient(logits, targets, ones, 32, &options).1)
        };
        let shared = run(logits.clone());
        assert_eq!(
            values(logits.clone()),
            before,
            "shared logits were overwritten"
        );
        assert_eq!(run(logits), shared);
    }
}

#[test]
fn a_part_of_the_vocabulary_is_refused() {
    let on = (&Device::flex(), DType::F32);
    let (targets, ones) = (ints(&[3], on.0), Tensor::ones([1], on));
    let logits = Tensor::<2>::zeros([1, 8], on);
    insta::assert_snapshot!(
        message(|| loss_and_gradient(logits, targets, ones, 9, &Default::default())),
        @"cross_entropy: logits [1, 8] for 9 tokens: expected 9 columns or more, the whole vocabulary"
    );
}
