//! The forward pass of one head.

use std::ops::Range;

use super::load::{HeadRows, matrix};
use super::product::{LANES, ROWS, lanes, times_panels, times_rows};
use crate::cpu::{Element, Real};

/// The output of one head, whose rows are padded, with the log-sum-exp and the largest score of each row.
pub(super) struct HeadOutput<T> {
    pub out: Vec<T>,
    pub lse: Vec<T>,
    pub largest: Vec<T>,
}

/// Queries, keys and values of one head.
#[derive(Clone, Copy)]
pub(super) struct HeadInputs<'a, E: Element> {
    pub q: HeadRows<'a, E>,
    pub k: HeadRows<'a, E>,
    pub v: HeadRows<'a, E>,
    pub scale: E::Wide,
    pub sink: Option<E::Wide>,
    /// The visible keys of each query.
    pub visible: &'a [Range<usize>],
}

/// Returns the row stride of scores for this number of keys. A stride that is a power of two would map all rows to the
/// same cache sets.
#[inline(always)]
pub(super) fn scores_stride(keys: usize) -> usize {
    keys + LANES
}

/// Returns the range of columns that are visible to a tile of rows, rounded to complete panels.
#[inline(always)]
pub(super) fn panels_of(visible: &[Range<usize>]) -> Range<usize> {
    match (visible.first(), visible.last()) {
        (Some(first), Some(last)) if first.start < last.end => {
            first.start / LANES..last.end.div_ceil(LANES)
        }
        _ => 0..0,
    }
}

/// Computes the output of a head, [`ROWS`] queries at a time against all their visible keys.
#[inline(always)]
pub(super) fn forward<E: Element, const FUSED: bool>(
    head: HeadInputs<'_, E>,
) -> HeadOutput<E::Wide> {
    let ((width, queries), (value_width, _)) = (head.q.padded(), head.v.padded());
    let depth = head.q.width;
    let q = head.q.rows(head.scale);
    let (k, v) = (head.k.panels(), head.v.rows(E::Wide::ONE));
    let stride = scores_stride(head.k.padded().1);
    let mut scores = vec![E::Wide::ZERO; ROWS * stride];
    let mut out = vec![E::Wide::ZERO; queries * value_width];
    let mut lse = Vec::with_capacity(head.q.count);
    let mut most = Vec::with_capacity(head.q.count);
    for (strip, visible) in head.visible.chunks(ROWS).enumerate() {
        let panels = panels_of(visible);
        let (first, columns) = (panels.start * LANES, panels.len() * LANES);
        let rows = matrix(&q, width).from(strip * ROWS);
        let keys = &k[panels.start * depth * LANES..panels.end * depth * LANES];
        times_panels::<_, FUSED>(rows, depth, keys, &mut scores, stride);
        let mut factors = [E::Wide::ZERO; ROWS];
        for (row, range) in visible.iter().enumerate() {
            let scores = &mut scores[row * stride..][..columns];
            let (own, largest, sum) = softmax(scores, range, first, head.sink);
            most.push(own);
            let seen = sum > E::Wide::ZERO;
            factors[row] = if seen {
                E::Wide::ONE / sum
            } else {
                E::Wide::ZERO
            };
            lse.push(if seen {
                largest + sum.logarithm()
            } else {
                E::Wide::NEG_INFINITY
            });
        }
        let out = &mut out[strip * ROWS * value_width..][..ROWS * value_width];
        let values = matrix(&v, value_width).from(first);
        times_rows::<_, FUSED>(matrix(&scores, stride), columns, values, out);
        for (out, factor) in out.chunks_exact_mut(value_width).zip(factors) {
            out.iter_mut().for_each(|out| *out = *out * factor);
        }
    }
    HeadOutput {
        out,
        lse,
        largest: most,
    }
}

/// Replaces the scores of a row by `exp(score - largest)`, or by 0 for hidden columns. The scores start at column
/// `first`. Returns the largest score without the sink, the largest score with the sink, and the sum.
#[inline(always)]
fn softmax<T: Real>(
    scores: &mut [T],
    visible: &Range<usize>,
    first: usize,
    sink: Option<T>,
) -> (T, T, T) {
    mask_row(scores, visible, first, T::NEG_INFINITY);
    let mut most = [T::NEG_INFINITY; LANES];
    for chunk in scores.chunks_exact(LANES) {
        for n in 0..LANES {
            most[n] = if chunk[n] > most[n] {
                chunk[n]
            } else {
                most[n]
            };
        }
    }
    let seen = most.into_iter().fold(T::NEG_INFINITY, T::larger);
    let largest = sink.map_or(seen, |sink| sink.larger(seen));
    // If no key is visible, every weight becomes 0.
    let largest = if largest > T::NEG_INFINITY {
        largest
    } else {
        T::ZERO
    };
    let mut sums = [T::ZERO; LANES];
    for chunk in scores.chunks_exact_mut(LANES) {
        for n in 0..LANES {
            chunk[n] = (chunk[n] - largest).exponential();
            sums[n] += chunk[n];
        }
    }
    let own = sink.map_or(T::ZERO, |sink| (sink - largest).exponential());
    let sum = sums.into_iter().fold(own, |sum, one| sum + one);
    (seen, largest, sum)
}

/// Sets the masked values of a row to `value`. `values` starts at column `first`.
#[inline(always)]
pub(super) fn mask_row<T: Copy>(values: &mut [T], visible: &Range<usize>, first: usize, value: T) {
    let count = values.len();
    let low = visible.start.saturating_sub(first).min(count);
    let high = visible.end.saturating_sub(first).clamp(low, count);
    values[..low].fill(value);
    values[high..].fill(value);
}

/// Returns the sum of `a[i] * b[i]`.
#[inline(always)]
pub(super) fn dot<E: Element>(a: &[E], b: &[E]) -> E::Wide {
    let mut sums = [E::Wide::ZERO; LANES];
    let whole = a.len() / LANES * LANES;
    for at in (0..whole).step_by(LANES) {
        let (a, b) = (lanes(a, at), lanes(b, at));
        for n in 0..LANES {
            sums[n] += a[n].wide() * b[n].wide();
        }
    }
    let rest = a[whole..].iter().zip(&b[whole..]);
    let rest = rest.fold(E::Wide::ZERO, |sum, (a, b)| sum + a.wide() * b.wide());
    sums.into_iter().fold(rest, |sum, one| sum + one)
}
