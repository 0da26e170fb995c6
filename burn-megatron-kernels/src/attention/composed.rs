//! Reference attention, composed of Burn's own operations. It stores the scores `[batch, heads, queries, keys]` and
//! supports heads of any width.

use burn::tensor::{Bool, Int, Tensor};

use super::mask::MaskRange;
use super::options::{AttentionOptions, Heads};
use super::problem::AttentionProblem;
use crate::cpu::wide;
use crate::error::accept;
use crate::soft_cap::soft_cap;

/// Computes [`flash_attention`](super::flash_attention) with Burn's operations.
///
/// # Panics
///
/// Panics in the same cases as [`flash_attention`](super::flash_attention).
pub fn flash_attention(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    sink: Option<Tensor<1>>,
    options: &AttentionOptions,
) -> Tensor<4> {
    let problem = AttentionProblem::separate([&q, &k, &v], sink.as_ref(), options);
    let problem = accept(problem);
    attend(&problem, q, k, v, sink).0
}

/// Computes [`attention_forward`](super::attention_forward) with Burn's operations.
///
/// # Panics
///
/// Panics in the same cases as [`flash_attention`](super::flash_attention).
pub fn attention_forward(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    sink: Option<Tensor<1>>,
    options: &AttentionOptions,
) -> (Tensor<4>, Tensor<3>) {
    let problem = AttentionProblem::separate([&q, &k, &v], sink.as_ref(), options);
    let problem = accept(problem);
    let (out, sums) = attend(&problem, q, k, v, sink);
    (out, sums.log_sum_exp())
}

/// Computes [`merge`](super::merge()) with Burn's operations.
pub fn merge(
    (out, lse): (Tensor<4>, Tensor<3>),
    (other_out, other_lse): (Tensor<4>, Tensor<3>),
) -> (Tensor<4>, Tensor<3>) {
    let largest = lse.clone().max_pair(other_lse.clone());
    let unseen = largest.clone().equal_elem(f64::NEG_INFINITY);
    // exp(-inf - -inf) would be NaN.
    let largest = largest.mask_fill(unseen.clone(), 0.0);
    let share = (lse - largest.clone()).exp();
    let other_share = (other_lse - largest.clone()).exp();
    let sum = share.clone() + other_share.clone();
    let lse = sum.clone().log() + largest;
    let sum = sum.mask_fill(unseen, 1.0);
    // [batch, heads, queries] to [batch, queries, heads, 1]
    let factor = |share: Tensor<3>| (share / sum.clone()).swap_dims(1, 2).unsqueeze_dim::<4>(3);
    let out = out * factor(share) + other_out * factor(other_share);
    (out, lse)
}

/// Computes [`flash_attention_packed`](super::flash_attention_packed) with Burn's operations.
///
/// # Panics
///
/// Panics in the same cases as [`flash_attention_packed`](super::flash_attention_packed).
pub fn flash_attention_packed(
    qkv: Tensor<3>,
    heads: Heads,
    sink: Option<Tensor<1>>,
    options: &AttentionOptions,
) -> Tensor<3> {
    let problem = AttentionProblem::packed(&qkv, heads, sink.as_ref(), options);
    let problem = accept(problem);
    let [batch, seq, _] = qkv.dims();
    let part = |first: usize, count: usize| {
        let part = qkv
            .clone()
            .narrow(2, first * heads.width, count * heads.width);
        part.reshape([batch, seq, count, heads.width])
    };
    let q = part(0, heads.heads);
    let k = part(heads.heads, heads.groups);
    let v = part(heads.heads + heads.groups, heads.groups);
    attend(&problem, q, k, v, sink).0.flatten(2, 3)
}

/// The softmax statistics of each row, `[batch, heads, queries, 1]`.
struct SoftmaxSums {
    /// The largest score.
    largest: Tensor<4>,
    /// The sum of `exp(score - largest)`. It is 0 if no key is visible.
    sum: Tensor<4>,
}

impl SoftmaxSums {
    /// Returns the log-sum-exp, `[batch, heads, queries]`.
    fn log_sum_exp(self) -> Tensor<3> {
        (self.sum.log() + self.largest).squeeze_dim(3)
    }
}

/// Returns the output and the sums of the softmax.
fn attend(
    problem: &AttentionProblem,
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    sink: Option<Tensor<1>>,
) -> (Tensor<4>, SoftmaxSums) {
    let Heads {
        heads,
        groups,
        width,
    } = problem.heads;
    let (batch, queries, keys) = (problem.batch, problem.queries, problem.keys);
    let type_of_sums = wide(problem.dtype);
    let sink = sink.map(|sink| {
        let sink = sink.cast(type_of_sums).reshape([1, heads, 1, 1]);
        sink.expand([batch, heads, queries, 1])
    });
    if problem.is_empty() {
        let zeros = Tensor::zeros([batch, heads, queries, 1], (&q.device(), type_of_sums));
        let sum = match sink {
            Some(_) => zeros.ones_like(),
            None => zeros.clone(),
        };
        let largest = sink.unwrap_or(zeros);
        let out = Tensor::zeros(problem.out_shape(), (&q.device(), problem.dtype));
        return (out, SoftmaxSums { largest, sum });
    }
    let by_head = |x: Tensor<4>| x.swap_dims(1, 2).cast(type_of_sums);
    // The heads of a group are rows of one matrix multiplication.
    let grouped = [batch, groups, heads / groups * queries, width];
    let q = by_head(q).reshape(grouped);
    let scores = q
        .matmul(by_head(k).swap_dims(2, 3))
        .mul_scalar(problem.scale);
    let scores = scores.reshape([batch, heads, queries, keys]);
    let scores = match problem.options.soft_cap {
        Some(cap) => soft_cap(scores, cap),
        None => scores,
    };
    let hidden = hidden(problem, &scores).expand([batch, heads, queries, keys]);
    let scores = scores.mask_fill(hidden, f64::NEG_INFINITY);

    // The largest score is subtracted. It is finite even if no key is visible.
    let mut largest = scores.clone().detach().max_dim(3).clamp_min(-1e30);
    if let Some(sink) = &sink {
        largest = largest.max_pair(sink.clone().detach());
    }
    let weights = (scores - largest.clone()).exp();
    let mut sum = weights.clone().sum_dim(3);
    if let Some(sink) = sink {
        sum = sum + (sink - largest.clone()).exp();
    }
    let none = sum.clone().equal_elem(0.0);
    let weights = weights / sum.clone().mask_fill(none, 1.0);
    let weights = weights.reshape([batch, groups, heads / groups * queries, keys]);
    let out = weights.matmul(by_head(v));
    let out = out.reshape([batch, heads, queries, problem.value_width]);
    let out = out.swap_dims(1, 2).cast(problem.dtype);
    (out, SoftmaxSums { largest, sum })
}

/// Returns the mask `[1, 1, queries, keys]`, which is true where a key is hidden.
fn hidden(problem: &AttentionProblem, scores: &Tensor<4>) -> Tensor<4, Bool> {
    let (queries, keys) = (problem.queries, problem.keys);
    let device = scores.device();
    let count = |n: usize| Tensor::<1, Int>::arange(0..n as i64, &device);
    let band = MaskRange::new(queries, keys, &problem.options);
    let place = count(queries).reshape([queries, 1]).add_scalar(band.shift);
    let place = place.expand([queries, keys]);
    let key = count(keys).reshape([1, keys]).expand([queries, keys]);
    let before = key.clone().lower(place.clone().sub_scalar(band.before));
    let mut hidden = before.bool_or(key.clone().greater(place.add_scalar(band.after)));
    if let Some(ranges) = &problem.options.ranges {
        let bounds = ranges.of_queries().clone().cast(key.dtype());
        let bound = |row: usize| {
            let bound = bounds.clone().narrow(0, row, 1).reshape([queries, 1]);
            bound.expand([queries, keys])
        };
        hidden = hidden.bool_or(key.clone().lower(bound(0)));
        hidden = hidden.bool_or(key.greater_equal(bound(1)));
    }
    hidden.reshape([1, 1, queries, keys])
}
