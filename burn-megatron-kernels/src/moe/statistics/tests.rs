use burn::tensor::{DType, Device, Tensor, TensorData};
use insta::assert_snapshot;

use super::*;
use crate::moe::router::tests::golden::LOGITS;
use crate::testing::{Input, compare, compare_within, devices};

const SCORES: [ScoreFunction; 4] = [
    ScoreFunction::Softmax,
    ScoreFunction::PreSoftmax,
    ScoreFunction::Sigmoid,
    ScoreFunction::SqrtSoftplus,
];

fn floats<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    x.into_data().iter::<f64>().collect()
}

fn validity(tokens: usize, like: &Tensor<1>) -> Tensor<1, Bool> {
    let valid: Vec<bool> = (0..tokens).map(|token| token % 5 != 3).collect();
    Tensor::from_data(TensorData::new(valid, [tokens]), &like.device().inner())
}

#[test]
fn sums_and_gradients_equal_the_composition() {
    // Each case has tokens, experts and sequences. The cases have one strip, several strips, and more experts than
    // units.
    let sizes = [(6, 2, 1), (36, 5, 3), (150, 70, 2), (300, 33, 1)];
    for (turn, (tokens, experts, sequences)) in sizes.into_iter().enumerate() {
        let logits = |x: &[Tensor<1>]| x[0].clone().reshape([tokens, experts]);
        let input = [Input::wave([tokens, experts], 0.3).scaled(1.5, -0.2)];
        for (i, score) in SCORES.into_iter().enumerate() {
            let padded = (turn + i) % 2 == 0;
            let valid = |x: &[Tensor<1>]| padded.then(|| validity(tokens, &x[0]));
            compare_within(
                4.0,
                &format!("sums of {score:?} of {tokens}, {experts}, {sequences}, padded {padded}"),
                &input,
                |x| {
                    let sums = sum_scores(logits(x), score, sequences, valid(x));
                    sums.reshape([sequences * experts])
                },
                |x| {
                    let sums = composed::sum_scores(logits(x), score, sequences, valid(x));
                    sums.reshape([sequences * experts])
                },
            );
        }
        let padded = turn % 2 == 1;
        let valid = |x: &[Tensor<1>]| padded.then(|| validity(tokens, &x[0]));
        compare(
            &format!("squares of {tokens}, {experts}, padded {padded}"),
            &input,
            |x| sum_squared_lse(logits(x), valid(x)),
            |x| composed::sum_squared_lse(logits(x), valid(x)),
        );
    }
}

#[test]
fn the_loss_of_sequences_is_their_mean() {
    let (sequences, experts, top_k, tokens) = (3, 4, 2, 12);
    let counts = [[3.0, 3.0, 1.0, 1.0], [8.0, 0.0, 0.0, 0.0], [0.0; 4]];
    let scores: Vec<f64> = (0..sequences * experts)
        .map(|i| 0.3 + 0.1 * i as f64)
        .collect();
    let mut expected = 0.0;
    for (counts, scores) in counts.iter().zip(scores.chunks(experts)) {
        let of_tokens = counts.iter().sum::<f64>() / top_k as f64;
        let product: f64 = counts.iter().zip(scores).map(|(c, p)| c * p).sum();
        if of_tokens > 0.0 {
            expected += experts as f64 / (top_k as f64 * of_tokens * of_tokens) * product;
        }
    }
    let device = Device::flex();
    let matrix = |values: Vec<f64>| {
        let data = TensorData::new(values, [sequences, experts]);
        Tensor::<2>::from_data(data, (&device, DType::F64))
    };
    let loss = load_balancing_loss(matrix(scores), matrix(counts.concat()), top_k);
    assert!((floats(loss)[0] - expected / sequences as f64).abs() < 1e-14);
    // The loss of balanced experts is 1.
    let even = matrix(vec![tokens as f64 / experts as f64; sequences * experts]);
    let counts = matrix(vec![(tokens * top_k / experts) as f64; sequences * experts]);
    assert!((floats(load_balancing_loss(even, counts, top_k))[0] - 1.0).abs() < 1e-14);
}

#[test]
fn choices_are_counted_by_sequence() {
    for (device, _) in devices() {
        for (sequences, length, experts) in [(1, 3, 5), (3, 400, 7), (2, 700, 300)] {
            let pairs = sequences * length * 2;
            let choice = |pair: usize| match pair % 13 {
                0 => -1,
                1 => experts as i32,
                spread => (pair * spread / 3 % experts) as i32,
            };
            let choices: Vec<i32> = (0..pairs).map(choice).collect();
            let mut expected = vec![0; sequences * experts];
            for (pair, choice) in choices.iter().enumerate() {
                if (0..experts as i32).contains(choice) {
                    expected[pair / (2 * length) * experts + *choice as usize] += 1;
                }
            }
            let data = TensorData::new(choices, [sequences * length, 2]);
            let indices = Tensor::from_data(data, (&device, DType::I32));
            let counts = count_experts(indices, experts, sequences);
            assert_eq!(counts.dims(), [sequences, experts]);
            let counts: Vec<i32> = counts.into_data().iter::<i32>().collect();
            assert_eq!(counts, expected, "{sequences} of {length} on {device:?}");
        }
    }
}

#[test]
fn no_token_is_no_sum() {
    for (device, _) in devices() {
        let logits = Tensor::<2>::empty([0, 4], &device);
        let sums = sum_scores(logits.clone(), ScoreFunction::Sigmoid, 2, None);
        assert_eq!(floats(sums), [0.0; 8]);
        assert_eq!(floats(sum_squared_lse(logits, None)), [0.0]);
        let none = Tensor::<2, Int>::empty([0, 2], (&device, DType::I32));
        let counts: Vec<i32> = count_experts(none, 3, 1)
            .into_data()
            .iter::<i32>()
            .collect();
        assert_eq!(counts, [0; 3]);
    }
}

fn golden() -> Tensor<2> {
    let device = Device::flex().autodiff();
    let data = TensorData::new(LOGITS.to_vec(), [4, 4]);
    Tensor::from_data(data, (&device, DType::F64)).require_grad()
}

fn assert_near(actual: &[f64], expected: &[f64]) {
    for (actual, expected) in actual.iter().zip(expected) {
        assert!((actual - expected).abs() < 1e-7, "{actual} and {expected}");
    }
}

#[test]
fn the_golden_losses() {
    let counts = || {
        let data = TensorData::new(vec![3.0, 4.0, 1.0, 0.0], [1, 4]);
        Tensor::<2>::from_data(data, (&Device::flex(), DType::F64))
    };
    let logits = golden();
    let sums = sum_scores(logits.clone(), ScoreFunction::Softmax, 1, None);
    assert_near(
        &floats(sums.clone()),
        &[1.3538384, 1.9311702, 0.4464932, 0.2684983],
    );
    let loss = load_balancing_loss(sums, counts(), 2);
    assert_near(&floats(loss.clone()), &[1.529086132]);
    let gradient = floats(logits.grad(&loss.backward()).unwrap());
    assert_near(
        &gradient[..4],
        &[0.0027030, 0.0306047, -0.0214203, -0.0118874],
    );
    let sums = sum_scores(golden(), ScoreFunction::Sigmoid, 1, None);
    assert_near(
        &floats(load_balancing_loss(sums, counts(), 2)),
        &[1.211388432],
    );

    let logits = golden();
    let loss = sum_squared_lse(logits.clone(), None).div_scalar(4.0);
    assert_near(&floats(loss.clone()), &[6.938122580]);
    let gradient = floats(logits.grad(&loss.backward()).unwrap());
    assert_near(
        &gradient[..4],
        &[0.7856365, 0.2890195, 0.1063243, 0.0391145],
    );
}

#[test]
fn other_sizes_are_refused() {
    let message = |call: &dyn Fn()| {
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(call));
        let panic = panic.expect_err("the call must fail");
        panic.downcast_ref::<String>().cloned().unwrap()
    };
    let device = Device::flex();
    let logits = || Tensor::<2>::zeros([6, 4], &device);
    let sum = |sequences, valid| {
        drop(sum_scores(
            logits(),
            ScoreFunction::Softmax,
            sequences,
            valid,
        ))
    };
    assert_snapshot!(
        message(&|| sum(4, None)),
        @"router statistics: 4 sequences of 6 tokens: expected a divisor of 6"
    );
    assert_snapshot!(
        message(&|| sum(1, Some(Tensor::full([5], true, &device)))),
        @"router statistics: valid is [5] for 6 tokens: expected [6]"
    );
    let zeros = |shape| Tensor::<2>::zeros(shape, &device);
    assert_snapshot!(
        message(&|| drop(load_balancing_loss(zeros([1, 4]), zeros([1, 3]), 2))),
        @"router statistics: sums of scores are [1, 4], counts [1, 3]: expected equal shapes"
    );
}
