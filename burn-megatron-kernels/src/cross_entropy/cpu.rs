//! The CPU implementations. They process rows in parallel, and each row in blocks that stay in the L1 cache.

use burn::backend::flex::FlexTensor;
use burn::tensor::DType;

use super::STATISTICS;
use super::ops::{LossOp, LossWeights, Vocabulary};
use crate::cpu::{
    Element, Real, for_each_task, for_float, for_rows, rows_per_task, slice, tensor, vectorized,
};

/// The number of elements per block.
const BLOCK: usize = 1024;

/// The number of partial results of a sum over a block. With several partial results, the loop is compiled to SIMD code
/// with several accumulators.
const LANES: usize = 32;

/// The kind of a target: a token, an ignored target or an invalid target.
#[derive(Clone, Copy)]
enum RowTarget {
    Ignored,
    Invalid,
    Token(u32),
}

impl Vocabulary {
    fn target(&self, target: i64) -> RowTarget {
        match u32::try_from(target) {
            _ if Some(target) == self.ignore => RowTarget::Ignored,
            Ok(token) if token < self.tokens => RowTarget::Token(token),
            _ => RowTarget::Invalid,
        }
    }

    /// Returns the column of a token, if this shard of the vocabulary contains the token.
    fn column(&self, target: RowTarget) -> Option<usize> {
        match target {
            RowTarget::Token(token) => token
                .checked_sub(self.first)
                .filter(|column| *column < self.valid)
                .map(|column| column as usize),
            _ => None,
        }
    }
}

/// Returns the targets as i64. Values that exceed the range of i64 become values outside every vocabulary.
fn targets(tensor: &FlexTensor) -> Vec<i64> {
    fn cast<E: burn::tensor::Element + bytemuck::Pod>(tensor: &FlexTensor) -> Vec<i64>
    where
        i64: TryFrom<E>,
    {
        let values = tensor.as_slice::<E>().unwrap_or_default().iter();
        values
            .map(|x| i64::try_from(*x).unwrap_or(i64::MAX))
            .collect()
    }
    match tensor.dtype() {
        DType::I64 => cast::<i64>(tensor),
        DType::I32 => cast::<i32>(tensor),
        DType::U64 => cast::<u64>(tensor),
        DType::U32 => cast::<u32>(tensor),
        other => unreachable!("targets in {other:?} have been cast before"),
    }
}

/// Computes the statistics `[rows, 4]` of logits `[rows, width]`.
pub(super) fn statistics(op: &LossOp, logits: &FlexTensor, target: &FlexTensor) -> FlexTensor {
    let vocabulary = &op.vocabulary;
    let [rows, width] = dims(logits);
    let targets = targets(target);
    for_float!(logits.dtype(), E => {
        let logits = slice::<E>(logits);
        let mut output = vec![<E as Element>::Wide::ZERO; rows * STATISTICS];
        let tasks = rows_per_task(width);
        for_each_task(output.chunks_mut(tasks * STATISTICS).enumerate(), |(task, output)| {
            let rows = output.chunks_exact_mut(STATISTICS).enumerate();
            for (i, output) in rows {
                let row = task * tasks + i;
                let logits = &logits[row * width..][..vocabulary.valid as usize];
                let column = vocabulary.column(vocabulary.target(targets[row]));
                let target = column.map_or(Real::ZERO, |column| logits[column].wide());
                let online = vectorized(#[inline(always)] || OnlineSoftmax::read(logits));
                output.copy_from_slice(&[online.max, online.exponentials, target, online.sum]);
            }
        });
        tensor::<<E as Element>::Wide>(output, [rows, STATISTICS])
    })
}

fn dims(tensor: &FlexTensor) -> [usize; 2] {
    let shape = tensor.layout().shape();
    [shape[0], shape[1]]
}

/// Returns the lowest finite value.
fn lowest<W: Real>() -> W {
    let double = W::of(f64::MIN);
    if double.finite() {
        double
    } else {
        W::of(f64::from(f32::MIN))
    }
}

/// The maximum, the sum of `exp(x - maximum)` and the sum of the elements that have been read so far.
#[derive(Clone, Copy)]
struct OnlineSoftmax<W> {
    max: W,
    exponentials: W,
    sum: W,
}

impl<W: Real> OnlineSoftmax<W> {
    /// Reads the columns of a row that are tokens, without the padding.
    #[inline(always)]
    fn read<E: Element<Wide = W>>(row: &[E]) -> Self {
        let mut online = Self {
            max: lowest(),
            exponentials: W::ZERO,
            sum: W::ZERO,
        };
        for block in row.chunks(BLOCK) {
            online = online.join(block);
        }
        online
    }

    /// Adds up to [`BLOCK`] elements.
    #[inline(always)]
    fn join<E: Element<Wide = W>>(self, block: &[E]) -> Self {
        let mut values = [W::ZERO; BLOCK];
        let values = &mut values[..block.len()];
        let mut lanes = PartialSums {
            larger: [self.max; LANES],
            sums: [W::ZERO; LANES],
        };
        // The chunks have a constant size, so that loops over a chunk have no remainder.
        let (wide, wide_rest) = values.as_chunks_mut::<LANES>();
        let (chunks, rest) = block.as_chunks::<LANES>();
        for (values, chunk) in wide.iter_mut().zip(chunks) {
            lanes.read(values, chunk);
        }
        lanes.read(wide_rest, rest);
        let max = fold(lanes.larger, larger);

        let mut exponentials = [W::ZERO; LANES];
        let (chunks, rest) = values.as_chunks::<LANES>();
        for chunk in chunks {
            add_exponentials(&mut exponentials, chunk, max);
        }
        add_exponentials(&mut exponentials, rest, max);
        let rescaled = self.exponentials * (self.max - max).exponential();
        Self {
            max,
            exponentials: rescaled + fold(exponentials, |a, b| a + b),
            sum: self.sum + fold(lanes.sums, |a, b| a + b),
        }
    }
}

/// Partial maxima and sums of a block, one per lane.
struct PartialSums<W> {
    larger: [W; LANES],
    sums: [W; LANES],
}

impl<W: Real> PartialSums<W> {
    #[inline(always)]
    fn read<E: Element<Wide = W>>(&mut self, values: &mut [W], chunk: &[E]) {
        let lanes = self.larger.iter_mut().zip(&mut self.sums);
        for ((value, x), (most, sum)) in values.iter_mut().zip(chunk).zip(lanes) {
            *value = x.wide();
            *most = larger(*most, *value);
            *sum += *value;
        }
    }
}

/// Returns the larger value. The result is never NaN. A NaN enters the result through the exponentials.
#[inline(always)]
fn larger<W: Real>(a: W, b: W) -> W {
    if b > a { b } else { a }
}

#[inline(always)]
fn add_exponentials<W: Real>(lanes: &mut [W; LANES], chunk: &[W], max: W) {
    for (lane, value) in lanes.iter_mut().zip(chunk) {
        *lane += (*value - max).exponential();
    }
}

/// Reduces the lanes to one value by repeatedly joining their halves.
#[inline(always)]
fn fold<W: Real>(mut lanes: [W; LANES], join: impl Fn(W, W) -> W) -> W {
    let mut count = LANES / 2;
    while count > 0 {
        for i in 0..count {
            lanes[i] = join(lanes[i], lanes[i + count]);
        }
        count /= 2;
    }
    lanes[0]
}

/// Computes the loss and the log-sum-exp from statistics `[parts, rows, 4]`.
pub(super) fn combine(op: &LossOp, parts: &FlexTensor, target: &FlexTensor) -> Vec<FlexTensor> {
    let targets = targets(target);
    for_float!(parts.dtype(), E => {
        let parts = slice::<E>(parts);
        let rows = targets.iter().enumerate();
        let (losses, sums): (Vec<_>, Vec<_>) = rows
            .map(|(row, target)| {
                let parts = parts.chunks_exact(STATISTICS);
                let parts = parts.skip(row).step_by(targets.len());
                combine_row(parts, op.vocabulary.target(*target), &op.weights)
            })
            .unzip();
        let shape = [targets.len()];
        vec![tensor::<E>(losses, shape), tensor::<E>(sums, shape)]
    })
}

/// Returns the loss and the log-sum-exp of a row. They are computed in f64, because there are few values.
fn combine_row<'a, E: Element>(
    parts: impl Iterator<Item = &'a [E]> + Clone,
    target: RowTarget,
    weights: &LossWeights,
) -> (E, E) {
    let parts = parts.map(|part| [0, 1, 2, 3].map(|i| part[i].wide().double()));
    let max = parts.clone().fold(f64::MIN, |max, part| max.max(part[0]));
    let (mut exponentials, mut logit, mut sum) = (0.0, 0.0, 0.0);
    for part in parts {
        exponentials += part[1] * (part[0] - max).exp();
        logit += part[2];
        sum += part[3];
    }
    let log = exponentials.ln();
    let lse = max + log;
    // In this order, large logits cancel before small terms are added.
    let mut loss = weights.keep * (max - logit) + log;
    if weights.smoothing != 0.0 {
        loss += weights.smoothing * max - weights.share * sum;
    }
    if weights.z != 0.0 {
        loss += weights.z * lse * lse;
    }
    let loss = match target {
        RowTarget::Ignored => 0.0,
        RowTarget::Invalid => f64::NAN,
        RowTarget::Token(_) => loss,
    };
    let narrow = |x| E::narrow(E::Wide::of(x));
    (narrow(loss), narrow(lse))
}

/// Returns the gradient of the logits. It is written into the memory of the logits if no other tensor shares it.
pub(super) fn gradient(op: &LossOp, inputs: [FlexTensor; 4]) -> FlexTensor {
    let [mut logits, target, lse, gradient] = inputs;
    let [rows, width] = dims(&logits);
    let targets = targets(&target);
    for_float!(logits.dtype(), E => {
        let (lse, gradient) = (slice(&lse), slice(&gradient));
        // If `from` is given, it holds the logits. Otherwise `values` holds them.
        let fill = |values: &mut [E], from: Option<&[E]>| {
            for_rows(values, width, #[inline(always)] |row, values| {
                let from = from.map(|from| &from[row * width..][..width]);
                let target = op.vocabulary.target(targets[row]);
                RowGradient::new(op, target, lse[row], gradient[row]).write(values, from);
            });
        };
        let offsets = logits.layout().contiguous_offsets();
        match offsets {
            Some((start, end)) if logits.is_unique() => {
                fill(&mut logits.storage_mut::<E>()[start..end], None);
                logits
            }
            _ => {
                let mut values = vec![E::narrow(Real::ZERO); rows * width];
                fill(&mut values, Some(slice(&logits)));
                tensor::<E>(values, [rows, width])
            }
        }
    })
}

/// The scalars of a row's gradient `softmax * exp(x - lse) - share`, minus `keep` at the column of the target.
struct RowGradient<W> {
    ignored: bool,
    column: Option<usize>,
    valid: usize,
    lse: W,
    softmax: W,
    share: W,
    keep: W,
}

impl<W: Real> RowGradient<W> {
    fn new(op: &LossOp, target: RowTarget, lse: W, gradient: W) -> Self {
        let (vocabulary, weights) = (&op.vocabulary, &op.weights);
        let gradient = match target {
            RowTarget::Invalid => W::of(f64::NAN),
            _ => gradient,
        };
        Self {
            ignored: matches!(target, RowTarget::Ignored),
            column: vocabulary.column(target),
            valid: vocabulary.valid as usize,
            lse,
            softmax: gradient * (W::ONE + W::of(2.0 * weights.z) * lse),
            share: gradient * W::of(weights.share),
            keep: gradient * W::of(weights.keep),
        }
    }

    #[inline(always)]
    fn at(&self, x: W) -> W {
        self.softmax * (x - self.lse).exponential() - self.share
    }

    /// Replaces `values` by the gradient of the logits. The logits are in `from` if it is given, otherwise in `values`.
    #[inline(always)]
    fn write<E: Element<Wide = W>>(&self, values: &mut [E], from: Option<&[E]>) {
        let zero = E::narrow(W::ZERO);
        if self.ignored {
            values.fill(zero);
            return;
        }
        let target = self.column.map(|column| match from {
            Some(from) => from[column].wide(),
            None => values[column].wide(),
        });
        let (valid, padding) = values.split_at_mut(self.valid);
        match from {
            Some(from) => {
                for (value, x) in valid.iter_mut().zip(from) {
                    *value = E::narrow(self.at(x.wide()));
                }
            }
            None => {
                for value in valid.iter_mut() {
                    *value = E::narrow(self.at(value.wide()));
                }
            }
        }
        padding.fill(zero);
        if let (Some(column), Some(x)) = (self.column, target) {
            values[column] = E::narrow(self.at(x) - self.keep);
        }
    }
}
