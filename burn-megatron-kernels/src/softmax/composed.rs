//! The reference implementation of [`masked_softmax`](super::masked_softmax), composed of Burn's own operations.

use burn::tensor::{Bool, Device, Int, Tensor};

use super::{Mask, NAME, Sink, check};
use crate::cpu::wide;
use crate::error::{accept, check_size};

/// Computes [`super::masked_softmax`] with Burn's operations and Burn's autodiff.
///
/// # Panics
///
/// Panics in the same cases as [`super::masked_softmax`].
pub fn masked_softmax(scores: Tensor<4>, scale: f64, mask: &Mask, sink: Sink) -> Tensor<4> {
    let shape = scores.dims();
    accept(check(shape, scale, mask, &sink));
    accept(check_size(NAME, &shape));
    if shape.contains(&0) {
        return scores;
    }
    let dtype = scores.dtype();
    let lowest = f64::from(f32::MIN);
    let scaled = scores.cast(wide(dtype)) * scale;
    let low = scaled.clone().lower_equal_elem(lowest);
    let hidden = match hidden(shape, mask, &scaled.device()) {
        Some(hidden) => hidden.expand(shape).bool_or(low),
        None => low,
    };
    let scaled = scaled.mask_fill(hidden.clone(), lowest);
    let mut largest = scaled.clone().detach().max_dim(3);
    let sink = match sink {
        Sink::None => None,
        Sink::OffByOne => Some(largest.zeros_like()),
        Sink::PerHead(logits) => {
            let [batch, heads, queries, _] = shape;
            let logits = logits.cast(wide(dtype)).reshape([1, heads, 1, 1]);
            Some(logits.expand([batch, heads, queries, 1]))
        }
    };
    if let Some(sink) = &sink {
        largest = largest.max_pair(sink.clone().detach());
    }
    let shares = (scaled - largest.clone()).exp().mask_fill(hidden, 0.0);
    let mut total = shares.clone().sum_dim(3);
    if let Some(sink) = sink {
        total = total + (sink - largest).exp();
    }
    let nothing = total.clone().equal_elem(0.0);
    (shares / total.mask_fill(nothing, 1.0)).cast(dtype)
}

/// Returns the largest scaled visible score of each query, `[batch, heads, queries]` in f32 (f64 for f64). `scores` is
/// a plain tensor without autodiff. If no key is visible to a query, the result is the lowest finite f32.
///
/// # Panics
///
/// Panics in the same cases as [`super::masked_softmax`].
pub fn largest_scores(scores: Tensor<4>, scale: f64, mask: &Mask) -> Tensor<3> {
    let shape @ [batch, heads, queries, keys] = scores.dims();
    accept(check(shape, scale, mask, &Sink::None));
    let dtype = wide(scores.dtype());
    let scaled = scores.cast(dtype) * scale;
    let lowest = f64::from(f32::MIN);
    if keys == 0 {
        return Tensor::full([batch, heads, queries], lowest, (&scaled.device(), dtype));
    }
    let seen = match hidden(shape, mask, &scaled.device()) {
        Some(hidden) => scaled.mask_fill(hidden.expand(shape), lowest),
        None => scaled,
    };
    seen.max_dim(3).squeeze_dim(3)
}

/// Returns a tensor that is true for masked keys. Its shape can be expanded to the shape of the scores.
fn hidden(shape: [usize; 4], mask: &Mask, device: &Device) -> Option<Tensor<4, Bool>> {
    let [batch, _, queries, keys] = shape;
    let device = device.clone().inner();
    let key = || Tensor::<1, Int>::arange(0..keys as i64, &device).reshape([1, 1, 1, keys]);
    let window = |left: usize, right: usize| {
        let most = queries + keys;
        let (left, right) = (left.min(most) as i64, right.min(most) as i64);
        let query = Tensor::<1, Int>::arange(0..queries as i64, &device);
        let ahead = key() - query.reshape([1, 1, queries, 1]);
        let shift = keys as i64 - queries as i64;
        let early = ahead.clone().lower_elem(shift - left);
        early.bool_or(ahead.greater_elem(shift + right))
    };
    match mask {
        Mask::None => None,
        Mask::Causal => Some(window(usize::MAX, 0)),
        Mask::Window { left, right } => Some(window(*left, *right)),
        Mask::Lengths(lengths) => {
            let lengths = lengths.clone().inner().reshape([batch, 1, 1, 1]);
            let lengths = lengths.expand([batch, 1, 1, keys]);
            Some(key().expand([batch, 1, 1, keys]).greater_equal(lengths))
        }
        Mask::Hidden(hidden) => Some(hidden.clone().inner()),
    }
}
