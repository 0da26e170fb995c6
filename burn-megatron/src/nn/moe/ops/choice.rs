//! Scores of experts, the choice of the best, and the weights of the chosen.

use std::cmp::Ordering;

use burn::tensor::activation::{sigmoid, softmax};
use burn::tensor::{DType, Int, Tensor, TensorData};

use crate::nn::moe::{ExpertGroups, GroupScore, ScoreFunction};

/// Keeps the sum of scores that all underflow away from 0.
const EPSILON: f64 = 1e-20;
/// Above it `ln(1 + e^z)` is `z`; a little more, and `e^z` overflows in f32.
const LARGE_LOGIT: f64 = 40.0;
/// Below it `e^z` underflows in f32, and the derivative of the root would not be finite.
const SMALL_LOGIT: f64 = -80.0;

/// The scores `[tokens, experts]` of logits before any normalisation.
pub(in crate::nn::moe) fn scores(logits: Tensor<2>, function: ScoreFunction) -> Tensor<2> {
    match function {
        ScoreFunction::Softmax | ScoreFunction::PreSoftmax => softmax(logits, 1),
        ScoreFunction::Sigmoid => sigmoid(logits),
        ScoreFunction::SqrtSoftplus => softplus(logits).sqrt(),
    }
}

/// `ln(1 + e^z)`
fn softplus(z: Tensor<2>) -> Tensor<2> {
    let above = z.clone().sub_scalar(LARGE_LOGIT).clamp_min(0.0);
    z.clamp(SMALL_LOGIT, LARGE_LOGIT).exp().log1p() + above
}

/// The weights `[tokens, k]` of the chosen experts `[tokens, k]`, times `factor`.
pub(in crate::nn::moe) fn router_weights(
    logits: Tensor<2>,
    indices: Tensor<2, Int>,
    function: ScoreFunction,
    factor: f64,
) -> Tensor<2> {
    let [_, k] = indices.dims();
    let weights = match function {
        ScoreFunction::Softmax if k > 1 => softmax(logits.gather(1, indices), 1),
        ScoreFunction::Softmax | ScoreFunction::PreSoftmax => {
            scores(logits, function).gather(1, indices)
        }
        ScoreFunction::Sigmoid | ScoreFunction::SqrtSoftplus => {
            let chosen = scores(logits.gather(1, indices), function);
            if k > 1 { normalised(chosen) } else { chosen }
        }
    };
    if factor == 1.0 {
        weights
    } else {
        weights.mul_scalar(factor)
    }
}

/// Scores divided by their sum in each row.
pub(in crate::nn::moe) fn normalised(scores: Tensor<2>) -> Tensor<2> {
    let sum = scores.clone().sum_dim(1).add_scalar(EPSILON);
    scores / sum
}

/// The `k` largest of the plain scores `[tokens, experts]` in each row, best first, equal ones by index:
/// `[tokens, k]`. NaN is smaller than any number.
///
/// Reads the scores from the device.
pub(in crate::nn::moe) fn top_k(
    scores: Tensor<2>,
    k: usize,
    groups: Option<ExpertGroups>,
) -> Tensor<2, Int> {
    let ([tokens, experts], device) = (scores.dims(), scores.device());
    let values = scores.into_data().convert_dtype(DType::F64);
    let mut values: Vec<f64> = match values.try_into_vec() {
        Ok(values) => values,
        Err(error) => unreachable!("scores are floats: {error}"),
    };
    let mut chosen = Vec::with_capacity(tokens * k);
    for row in values.chunks_mut(experts) {
        for score in row.iter_mut().filter(|score| score.is_nan()) {
            *score = f64::NEG_INFINITY;
        }
        let candidates = match groups {
            None => (0..experts).collect(),
            Some(groups) => open_experts(row, groups),
        };
        chosen.extend(best(row, candidates).into_iter().take(k).map(|i| i as i64));
    }
    Tensor::from_data(TensorData::new(chosen, [tokens, k]), &device)
}

/// The experts of the best groups, ascending.
fn open_experts(row: &[f64], groups: ExpertGroups) -> Vec<usize> {
    let ExpertGroups {
        groups,
        chosen,
        score,
    } = groups;
    let size = row.len() / groups;
    let terms = match score {
        GroupScore::Max => 1,
        GroupScore::SumOf(n) => n,
    };
    let of_group = |group: &[f64]| {
        let best = best(group, (0..size).collect());
        best.into_iter().take(terms).map(|i| group[i]).sum::<f64>()
    };
    let of_groups: Vec<_> = row.chunks(size).map(of_group).collect();
    let mut open = best(&of_groups, (0..groups).collect());
    open.truncate(chosen);
    open.sort_unstable();
    let experts = open
        .into_iter()
        .map(|group| group * size..(group + 1) * size);
    experts.flatten().collect()
}

/// The indices in the order of their values, largest first, equal ones as they are.
fn best(values: &[f64], mut indices: Vec<usize>) -> Vec<usize> {
    let order = |a: &usize, b: &usize| values[*b].partial_cmp(&values[*a]);
    indices.sort_by(|a, b| order(a, b).unwrap_or(Ordering::Equal));
    indices
}
