//! The CPU implementation. It processes rows in parallel, with SIMD instructions over the visible keys of a row.

use std::ops::Range;

use burn::backend::flex::FlexTensor;

use super::{KeyRange, SinkKind, SoftmaxProblem};
use crate::cpu::{
    Element, Real, for_each_task, for_float, rows_per_task, slice, tensor, vectorized,
};

/// The number of partial sums and maxima. They fill two AVX registers, or one AVX-512 register.
const LANES: usize = 16;

/// Returns the lowest finite score. A score that is not above it counts as masked.
fn lowest<W: Real>() -> W {
    W::of(f64::from(f32::MIN))
}

pub(super) fn forward(plan: &SoftmaxProblem, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
    for_float!(inputs[0].dtype(), E => forward_as::<E>(plan, &inputs))
}

pub(super) fn backward(plan: &SoftmaxProblem, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
    for_float!(inputs[0].dtype(), E => backward_as::<E>(plan, &inputs))
}

fn forward_as<E: Element>(plan: &SoftmaxProblem, inputs: &[FlexTensor]) -> Vec<FlexTensor> {
    let [batch, heads, queries, keys] = plan.shape;
    let learned = usize::from(plan.sink == SinkKind::Learned);
    let scores = slice::<E>(&inputs[0]);
    let rows = MaskRows::new(plan, inputs.get(1 + learned));
    let hidden = plan.hidden.map(|_| bool_bytes(&inputs[1 + learned]));
    let sink = |row: usize| match plan.sink {
        SinkKind::None => None,
        SinkKind::Zero => Some(E::Wide::ZERO),
        SinkKind::Learned => Some(slice::<E::Wide>(&inputs[1])[row / queries % heads]),
    };

    let mut output = vec![E::narrow(E::Wide::ZERO); scores.len()];
    let mut shares = vec![E::Wide::ZERO; plan.rows()];
    let scale = E::Wide::of(plan.scale);
    for_tasks(
        keys,
        &mut output,
        &mut shares,
        #[inline(always)]
        |first, output: &mut [E], shares: &mut [E::Wide]| {
            let mut scratch = vec![E::Wide::ZERO; keys];
            let lines = output.chunks_exact_mut(keys).zip(shares);
            for (row, (output, share)) in (first..).zip(lines) {
                let visible_keys = rows.visible_keys(row);
                let hidden = hidden.map(|hidden| {
                    let at = rows.hidden(row) * keys;
                    &hidden[at + visible_keys.start..at + visible_keys.end]
                });
                *share = softmax_row(
                    &scores[row * keys..][visible_keys.clone()],
                    hidden,
                    scale,
                    sink(row),
                    &mut scratch[..visible_keys.len()],
                    &mut output[visible_keys],
                );
            }
        },
    );
    let output = tensor(output, plan.shape);
    match learned {
        0 => vec![output],
        _ => vec![output, tensor(shares, [batch, heads, queries])],
    }
}

/// Computes `output` from the visible scores of a row. Returns the probability of the sink.
#[inline(always)]
fn softmax_row<E: Element>(
    scores: &[E],
    hidden: Option<&[u8]>,
    scale: E::Wide,
    sink: Option<E::Wide>,
    scratch: &mut [E::Wide],
    output: &mut [E],
) -> E::Wide {
    let lowest = lowest::<E::Wide>();
    for (scaled, score) in scratch.iter_mut().zip(scores) {
        let value = score.wide() * scale;
        *scaled = if value <= lowest {
            E::Wide::NEG_INFINITY
        } else {
            value
        };
    }
    if let Some(hidden) = hidden {
        for (scaled, hidden) in scratch.iter_mut().zip(hidden) {
            *scaled = if *hidden != 0 {
                E::Wide::NEG_INFINITY
            } else {
                *scaled
            };
        }
    }
    // The maximum is finite. Therefore, if no key is visible, every difference to the maximum is -inf and none is NaN.
    let mut largest = fold(scratch, lowest, |value| *value, E::Wide::larger);
    if let Some(sink) = sink {
        largest = largest.larger(sink);
    }
    let visible_keys = fold(
        scratch,
        E::Wide::ZERO,
        #[inline(always)]
        |value| {
            *value = (*value - largest).exponential();
            *value
        },
        |a, b| a + b,
    );
    let sink = match sink {
        Some(sink) => (sink - largest).exponential(),
        None => E::Wide::ZERO,
    };
    let total = visible_keys + sink;
    let inverse = if total == E::Wide::ZERO {
        E::Wide::ZERO
    } else {
        E::Wide::ONE / total
    };
    for (output, weight) in output.iter_mut().zip(scratch.iter()) {
        *output = E::narrow(*weight * inverse);
    }
    sink * inverse
}

fn backward_as<E: Element>(plan: &SoftmaxProblem, inputs: &[FlexTensor]) -> Vec<FlexTensor> {
    let [batch, heads, queries, keys] = plan.shape;
    let learned = usize::from(plan.sink == SinkKind::Learned);
    let (output, gradient) = (slice::<E>(&inputs[0]), slice::<E>(&inputs[1]));
    let rows = MaskRows::new(plan, inputs.get(2 + learned));

    let mut scores = vec![E::narrow(E::Wide::ZERO); output.len()];
    let mut products = vec![E::Wide::ZERO; plan.rows()];
    let scale = E::Wide::of(plan.scale);
    for_tasks(
        keys,
        &mut scores,
        &mut products,
        #[inline(always)]
        |first, scores: &mut [E], products: &mut [E::Wide]| {
            let lines = scores.chunks_exact_mut(keys).zip(products);
            for (row, (scores, product)) in (first..).zip(lines) {
                let visible_keys = rows.visible_keys(row);
                *product = gradient_row(
                    &output[row * keys..][visible_keys.clone()],
                    &gradient[row * keys..][visible_keys.clone()],
                    scale,
                    &mut scores[visible_keys],
                );
            }
        },
    );
    let scores = tensor(scores, plan.shape);
    if learned == 0 {
        return vec![scores];
    }
    let shares = slice::<E::Wide>(&inputs[2]);
    let mut sink = vec![0.0f64; heads];
    for row in 0..batch * heads * queries {
        sink[row / queries % heads] -= (shares[row] * products[row]).double();
    }
    let sink: Vec<E::Wide> = sink.into_iter().map(E::Wide::of).collect();
    vec![scores, tensor(sink, [heads])]
}

/// Computes the gradient of a row of scores. Returns the sum of `gradient * output`.
#[inline(always)]
fn gradient_row<E: Element>(
    output: &[E],
    gradient: &[E],
    scale: E::Wide,
    scores: &mut [E],
) -> E::Wide {
    let zero = E::Wide::ZERO;
    let pairs = || output.chunks(LANES).zip(gradient.chunks(LANES));
    let mut sums = [zero; LANES];
    for (output, gradient) in pairs() {
        for ((sum, p), g) in sums.iter_mut().zip(output).zip(gradient) {
            let p = p.wide();
            *sum += if p == zero { zero } else { p * g.wide() };
        }
    }
    let product = sums.into_iter().fold(zero, |a, b| a + b);
    for ((score, p), g) in scores.iter_mut().zip(output).zip(gradient) {
        let p = p.wide();
        let value = scale * p * (g.wide() - product);
        *score = E::narrow(if p == zero { zero } else { value });
    }
    product
}

/// The mask, which determines the visible keys of each row.
struct MaskRows<'a> {
    plan: &'a SoftmaxProblem,
    lengths: &'a [i32],
}

impl<'a> MaskRows<'a> {
    fn new(plan: &'a SoftmaxProblem, mask: Option<&'a FlexTensor>) -> Self {
        let lengths = match (plan.span, mask) {
            (KeyRange::Lengths, Some(lengths)) => match lengths.as_slice() {
                Some(lengths) => lengths,
                None => unreachable!("lengths are launched as contiguous i32"),
            },
            _ => &[],
        };
        Self { plan, lengths }
    }

    #[inline(always)]
    fn visible_keys(&self, row: usize) -> Range<usize> {
        let [_, heads, queries, keys] = self.plan.shape;
        match self.plan.span {
            KeyRange::All => 0..keys,
            KeyRange::Lengths => 0..self.lengths[row / (heads * queries)] as usize,
            KeyRange::Window { left, right } => {
                // `queries` is added to both sides, so that no number is negative.
                let at = row % queries + keys;
                let end = (at + right + 1).saturating_sub(queries).min(keys);
                at.saturating_sub(queries + left).min(end)..end
            }
        }
    }

    /// Returns the row of the mask tensor that belongs to a row of the scores.
    #[inline(always)]
    fn hidden(&self, row: usize) -> usize {
        let [_, heads, queries, _] = self.plan.shape;
        let [hidden_batches, hidden_heads] = self.plan.hidden.unwrap_or([1, 1]);
        let (batch, head, query) = (
            row / (heads * queries),
            row / queries % heads,
            row % queries,
        );
        (batch % hidden_batches * hidden_heads + head % hidden_heads) * queries + query
    }
}

/// Returns the bytes of contiguous booleans. A byte is 0 for false.
fn bool_bytes(tensor: &FlexTensor) -> &[u8] {
    match tensor.layout().contiguous_offsets() {
        Some((start, end)) => &tensor.bytes()[start..end],
        None => unreachable!("inputs of a kernel are contiguous"),
    }
}

/// Calls `work(first row, rows, statistics)` for tasks of a fixed number of rows.
fn for_tasks<E: Element, W: Real>(
    width: usize,
    values: &mut [E],
    statistics: &mut [W],
    work: impl Fn(usize, &mut [E], &mut [W]) + Sync,
) {
    let rows = rows_per_task(width);
    let values = values.chunks_mut(rows * width);
    let tasks = values.zip(statistics.chunks_mut(rows)).enumerate();
    for_each_task(tasks, |(task, (values, statistics))| {
        vectorized(
            #[inline(always)]
            || work(task * rows, values, statistics),
        );
    });
}

/// Reduces the results of `map` to one value. `map` may also replace the values.
#[inline(always)]
fn fold<W: Real>(
    values: &mut [W],
    start: W,
    map: impl Fn(&mut W) -> W,
    join: impl Fn(W, W) -> W,
) -> W {
    let mut lanes = [start; LANES];
    let mut chunks = values.chunks_exact_mut(LANES);
    for chunk in &mut chunks {
        for i in 0..LANES {
            lanes[i] = join(lanes[i], map(&mut chunk[i]));
        }
    }
    for (lane, value) in lanes.iter_mut().zip(chunks.into_remainder()) {
        *lane = join(*lane, map(value));
    }
    lanes.into_iter().fold(start, join)
}
