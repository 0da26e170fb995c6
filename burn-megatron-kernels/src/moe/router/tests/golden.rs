//! Reference values that were computed independently in f64.

use super::*;

/// Logits of four tokens for four experts.
pub(in crate::moe) const LOGITS: [f64; 16] = [
    2.0, 1.0, 0.0, -1.0, 1.0, 2.0, 0.0, 0.5, 0.0, 3.0, 1.0, -2.0, 1.5, 1.0, 0.5, 0.0,
];

fn route(score: ScoreFunction, scaling_factor: f64) -> (Vec<i32>, Vec<f64>) {
    let options = RouterOptions {
        score,
        scaling_factor,
        ..RouterOptions::new(2)
    };
    let logits = matrix(LOGITS.to_vec(), 4, &Device::flex(), DType::F64);
    let (chosen, weights) = top_k_router(logits, &options, None);
    (ints(chosen), floats(weights))
}

fn assert_near(actual: &[f64], expected: &[f64]) {
    assert_eq!(actual.len(), expected.len());
    for (actual, expected) in actual.iter().zip(expected) {
        assert!((actual - expected).abs() < 1e-7, "{actual} and {expected}");
    }
}

const CHOSEN: [i32; 8] = [0, 1, 1, 0, 1, 2, 0, 1];

#[test]
fn softmax_after_the_choice() {
    let (chosen, weights) = route(ScoreFunction::Softmax, 1.0);
    assert_eq!(chosen, CHOSEN);
    assert_near(
        &weights,
        &[
            0.7310586, 0.2689414, 0.7310586, 0.2689414, 0.8807971, 0.1192029, 0.6224593, 0.3775407,
        ],
    );
}

#[test]
fn softmax_before_the_choice() {
    let (chosen, weights) = route(ScoreFunction::PreSoftmax, 1.0);
    assert_eq!(chosen, CHOSEN);
    assert_near(
        &weights,
        &[
            0.6439143, 0.2368828, 0.5792585, 0.2130973, 0.8390245, 0.1135496, 0.4550542, 0.2760043,
        ],
    );
}

#[test]
fn sigmoid_with_a_factor() {
    let (chosen, weights) = route(ScoreFunction::Sigmoid, 2.5);
    assert_eq!(chosen, CHOSEN);
    assert_near(&weights[..2], &[1.3661228, 1.1338772]);
    assert_near(&weights[4..6], &[1.4144625, 1.0855375]);
}

#[test]
fn groups_by_maximum_and_by_sum() {
    let chosen = |score| {
        let groups = ExpertGroups {
            groups: 4,
            chosen: 2,
            score,
        };
        let options = RouterOptions {
            groups: Some(groups),
            ..RouterOptions::new(4)
        };
        let scores = vec![0.9, 0.1, 0.6, 0.5, 0.8, 0.05, 0.3, 0.7];
        let logits = matrix(scores, 8, &Device::flex(), DType::F64);
        let mut chosen = ints(top_k_router(logits, &options, None).0);
        chosen.sort_unstable();
        chosen
    };
    assert_eq!(chosen(GroupScore::SumOf(2)), [0, 1, 2, 3]);
    assert_eq!(chosen(GroupScore::Max), [0, 1, 4, 5]);
}
