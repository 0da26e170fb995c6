use std::cmp::Ordering;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use super::*;
use crate::testing::{Input, assert_gradients, compare, devices};

pub(in crate::moe) mod golden;
mod refused;

const SCORES: [ScoreFunction; 4] = [
    ScoreFunction::Softmax,
    ScoreFunction::PreSoftmax,
    ScoreFunction::Sigmoid,
    ScoreFunction::SqrtSoftplus,
];

fn floats<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    x.into_data().iter::<f64>().collect()
}

fn ints(x: Tensor<2, Int>) -> Vec<i32> {
    x.into_data().iter::<i32>().collect()
}

fn matrix(values: Vec<f64>, columns: usize, device: &Device, dtype: DType) -> Tensor<2> {
    let shape = [values.len() / columns, columns];
    let data = TensorData::new(values, shape).convert_dtype(dtype);
    Tensor::from_data(data, (device, dtype))
}

/// Returns the indices in order of decreasing value. Equal values are in order of their indices.
fn order(values: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|a, b| {
        values[*b]
            .partial_cmp(&values[*a])
            .unwrap_or(Ordering::Equal)
    });
    order
}

/// Returns the choices of one token, found by sorting.
fn sorted_choice(logits: &[f64], bias: &[f64], options: &RouterOptions) -> Vec<i32> {
    let sum: f64 = logits.iter().map(|z| z.exp()).sum();
    let score = |z: &f64| match options.score {
        ScoreFunction::Softmax => *z,
        ScoreFunction::PreSoftmax => z.exp() / sum,
        ScoreFunction::Sigmoid => 1.0 / (1.0 + (-z).exp()),
        ScoreFunction::SqrtSoftplus => z.exp().ln_1p().sqrt(),
    };
    let scores: Vec<f64> = logits
        .iter()
        .zip(bias)
        .map(|(z, bias)| score(z) + bias)
        .collect();
    let all: Vec<usize> = order(&scores);
    let open = match options.groups {
        None => vec![true],
        Some(groups) => {
            let best = |members: &[f64]| -> f64 {
                let order = order(members).into_iter();
                order.take(groups.score.terms()).map(|i| members[i]).sum()
            };
            let size = logits.len() / groups.groups;
            let of_groups: Vec<f64> = scores.chunks(size).map(best).collect();
            let mut open = vec![false; groups.groups];
            let chosen = order(&of_groups).into_iter().take(groups.chosen);
            chosen.for_each(|group| open[group] = true);
            open
        }
    };
    let size = logits.len() / open.len();
    let all = all.into_iter().filter(|expert| open[expert / size]);
    all.take(options.top_k)
        .map(|expert| expert as i32)
        .collect()
}

fn sorted_choices(
    logits: &[f64],
    experts: usize,
    bias: &[f64],
    options: &RouterOptions,
) -> Vec<i32> {
    let tokens = logits.chunks(experts);
    tokens
        .flat_map(|row| sorted_choice(row, bias, options))
        .collect()
}

fn indices(values: Vec<i32>, top_k: usize, device: &Device) -> Tensor<2, Int> {
    let shape = [values.len() / top_k, top_k];
    Tensor::from_data(TensorData::new(values, shape), (device, DType::I32))
}

/// Returns options to test. Each element has its number of experts.
fn cases() -> Vec<(usize, RouterOptions)> {
    let mut cases = vec![];
    for score in SCORES {
        let options = |top_k, scaling_factor, groups| RouterOptions {
            top_k,
            score,
            normalized: None,
            scaling_factor,
            groups,
        };
        // These are the weights of several experts without normalization. A single normalized weight would be constant.
        let normalized = Some(false);
        let options_of_three = options(3, 1.5, None);
        cases.push((
            9,
            RouterOptions {
                normalized,
                ..options_of_three
            },
        ));
        cases.push((1, options(1, 1.0, None)));
        cases.push((5, options(1, 2.5, None)));
        cases.push((7, options(7, 1.0, None)));
        cases.push((100, options(6, 16.0, None)));
        for (of_group, chosen) in [(GroupScore::Max, 1), (GroupScore::SumOf(2), 3)] {
            let groups = ExpertGroups {
                groups: 6,
                chosen,
                score: of_group,
            };
            cases.push((48, options(4, 1.5, Some(groups))));
        }
    }
    cases
}

#[test]
fn choices_are_those_of_a_sort() {
    let tokens = 23;
    for (device, dtypes) in devices() {
        for dtype in dtypes {
            for (experts, options) in cases() {
                // Multiples of 1/64 are exact in all types, and several experts have the same logit.
                let values: Vec<f64> = Input::wave([tokens, experts], 0.2).values;
                let values: Vec<f64> = values.iter().map(|z| (z * 64.0).round() / 64.0).collect();
                let bias: Vec<f64> = (0..experts).map(|e| (e % 4) as f64 / 8.0).collect();
                let what = format!("{experts} experts, {options:?} in {dtype:?} on {device:?}");
                for bias in [vec![0.0; experts], bias] {
                    let logits = matrix(values.clone(), experts, &device, dtype);
                    let given = Tensor::from_data(
                        TensorData::new(bias.clone(), [experts]).convert_dtype(DType::F32),
                        (&device, DType::F32),
                    );
                    let (chosen, _) = top_k_router(logits, &options, Some(given));
                    let expected = sorted_choices(&values, experts, &bias, &options);
                    assert_eq!(ints(chosen), expected, "{what}");
                }
            }
        }
    }
}

#[test]
fn weights_and_gradients_equal_the_composition() {
    let tokens = 37;
    for (experts, options) in cases() {
        let logits = |x: &[Tensor<1>]| x[0].clone().reshape([tokens, experts]);
        let flat = |weights: Tensor<2>| weights.reshape([tokens * options.top_k]);
        compare(
            &format!("router of {experts}, {options:?}"),
            &[Input::wave([tokens, experts], 0.3).scaled(1.7, 0.1)],
            |x| flat(top_k_router(logits(x), &options, None).1),
            |x| {
                let chosen = sorted_choices(
                    &floats(x[0].clone()),
                    experts,
                    &vec![0.0; experts],
                    &options,
                );
                let chosen = indices(chosen, options.top_k, &x[0].device().inner());
                flat(composed::router_weights(logits(x), chosen, &options))
            },
        );
    }
}

#[test]
fn gradients_of_given_choices_are_those_of_differences() {
    for (experts, options) in cases().into_iter().filter(|(experts, _)| *experts < 48) {
        let tokens = 3;
        let chosen: Vec<i32> = (0..tokens)
            .flat_map(|token| (0..options.top_k).map(move |slot| ((token + slot) % experts) as i32))
            .collect();
        assert_gradients(
            &format!("replay of {experts}, {options:?}"),
            &[Input::wave([tokens, experts], 0.6)],
            |x| {
                let logits = x[0].clone().reshape([tokens, experts]);
                let given = indices(chosen.clone(), options.top_k, &x[0].device().inner());
                router_weights(logits, given, &options).reshape([tokens * options.top_k])
            },
        );
    }
}

#[test]
fn a_choice_without_an_expert_has_no_part() {
    for (device, _) in devices() {
        for score in SCORES {
            let options = RouterOptions {
                score,
                ..RouterOptions::new(3)
            };
            let values = vec![0.5, -1.0, 2.0, 0.25];
            let logits =
                || matrix(values.clone(), 4, &device.clone().autodiff(), DType::F32).require_grad();
            let of = |given: Vec<i32>, top_k| {
                let options = RouterOptions { top_k, ..options };
                let logits = logits();
                let weights =
                    router_weights(logits.clone(), indices(given, top_k, &device), &options);
                let first = weights.clone().narrow(1, top_k - 1, 1).sum().backward();
                (floats(weights), floats(logits.grad(&first).unwrap()))
            };
            // There are two valid choices. The loss is the weight of the last choice.
            let (three, of_three) = of(vec![-1, 2, 0], 3);
            let (two, of_two) = of(vec![2, 0], 2);
            assert_eq!(three, [vec![0.0], two].concat(), "{score:?} on {device:?}");
            assert_eq!(of_three, of_two, "{score:?} on {device:?}");
            assert_eq!(of(vec![4, -7, 9], 3).0, [0.0; 3], "{score:?} on {device:?}");
        }
    }
}

#[test]
fn extreme_logits_have_finite_weights() {
    for (device, _) in devices() {
        for score in SCORES {
            let options = RouterOptions {
                score,
                ..RouterOptions::new(2)
            };
            let values = vec![3e4, -3e4, 1e4, -200.0, -3e4, -3e4, -3e4, -3e4];
            let logits = matrix(values, 4, &device.clone().autodiff(), DType::F32).require_grad();
            let (chosen, weights) = top_k_router(logits.clone(), &options, None);
            let chosen = ints(chosen);
            // With a softmax over all experts, all scores except the largest are 0. The expert with the lowest index is
            // second.
            let second = if score == ScoreFunction::PreSoftmax {
                1
            } else {
                2
            };
            assert_eq!(chosen, [0, second, 0, 1], "{score:?} on {device:?}");
            let gradients = weights.clone().sum().backward();
            let all = [floats(weights), floats(logits.grad(&gradients).unwrap())].concat();
            assert!(
                all.iter().all(|x| x.is_finite()),
                "{score:?} on {device:?}: {all:?}"
            );
        }
    }
}

#[test]
fn scores_that_are_not_numbers_come_last() {
    for (device, _) in devices() {
        let values = vec![f64::NAN, 1.0, f64::NEG_INFINITY, -5.0, f64::NAN, 1.0];
        let logits = matrix(values, 6, &device, DType::F32);
        let (chosen, _) = top_k_router(logits, &RouterOptions::new(6), None);
        assert_eq!(ints(chosen), [1, 5, 3, 0, 2, 4], "on {device:?}");
    }
}

#[test]
fn no_token_is_no_choice() {
    for (device, _) in devices() {
        let logits = Tensor::<2>::empty([0, 4], &device);
        let (chosen, weights) = top_k_router(logits, &RouterOptions::new(2), None);
        assert_eq!((chosen.dims(), weights.dims()), ([0, 2], [0, 2]));
    }
}
