//! The CPU implementation. It processes strips of tokens in parallel and adds the sums of the strips in order.

use burn::backend::flex::FlexTensor;
use rayon::prelude::*;

use super::backward::{SequenceSums, SumKind};
use crate::cpu::{Element, Real, slice, tensor};
use crate::moe::permutation::sort::expert;
use crate::moe::score::cpu::Denominator;

/// The number of tokens per strip.
const STRIP: usize = 64;

/// Computes the sums. See [`StatisticsOp::Sums`](super::backward::StatisticsOp::Sums).
pub(super) fn sums<E: Element>(op: SequenceSums, inputs: &[FlexTensor]) -> FlexTensor {
    let shape = inputs[0].layout().shape();
    let [tokens, experts] = [shape[0], shape[1]];
    let logits = slice::<E>(&inputs[0]);
    let valid = inputs.get(1).map(slice::<E::Wide>);
    let width = op.kind.width(experts);
    let length = tokens / op.sequences;
    let strips = length.div_ceil(STRIP);
    let strip = |task: usize| {
        let start = task / strips * length;
        let first = start + task % strips * STRIP;
        let mut sums = vec![E::Wide::ZERO; width];
        for token in
            (first..(first + STRIP).min(start + length)).filter(|token| counts(valid, *token))
        {
            let row = &logits[token * experts..(token + 1) * experts];
            add_token(op.kind, row, &mut sums);
        }
        sums
    };
    let tasks = (0..op.sequences * strips).into_par_iter();
    let parts: Vec<Vec<E::Wide>> = tasks.map(strip).collect();
    let mut sums = vec![E::Wide::ZERO; op.sequences * width];
    for (task, part) in parts.iter().enumerate() {
        let sequence = &mut sums[task / strips * width..][..width];
        sequence
            .iter_mut()
            .zip(part)
            .for_each(|(sum, part)| *sum += *part);
    }
    tensor(sums, [op.sequences * width])
}

fn counts<W: Real>(valid: Option<&[W]>, token: usize) -> bool {
    valid.is_none_or(|valid| valid[token] != W::ZERO)
}

fn add_token<E: Element>(kind: SumKind, row: &[E], sums: &mut [E::Wide]) {
    let score = kind.score();
    let shared = Denominator::of(score, row.iter().map(|z| z.wide()));
    match kind {
        SumKind::SquaredLse => {
            let lse = shared.largest + shared.total.logarithm();
            sums[0] += lse * lse;
        }
        SumKind::Scores(_) => {
            for (sum, z) in sums.iter_mut().zip(row) {
                *sum += shared.score(score, z.wide());
            }
        }
    }
}

/// Computes the gradient. See [`StatisticsOp::Gradient`](super::backward::StatisticsOp::Gradient).
pub(super) fn gradient<E: Element>(op: SequenceSums, inputs: &[FlexTensor]) -> FlexTensor {
    let shape = inputs[0].layout().shape();
    let [tokens, experts] = [shape[0], shape[1]];
    let logits = slice::<E>(&inputs[0]);
    let upstream = slice::<E::Wide>(&inputs[1]);
    let valid = inputs.get(2).map(slice::<E::Wide>);
    let width = op.kind.width(experts);
    let length = tokens / op.sequences;
    let mut gradient = vec![E::narrow(E::Wide::ZERO); logits.len()];
    let strips = gradient.par_chunks_mut(STRIP * experts).enumerate();
    strips.for_each(|(strip, gradient)| {
        for (i, gradient) in gradient.chunks_exact_mut(experts).enumerate() {
            let token = strip * STRIP + i;
            if counts(valid, token) {
                let row = &logits[token * experts..(token + 1) * experts];
                let sequence = &upstream[token / length * width..][..width];
                token_gradient(op.kind, row, sequence, gradient);
            }
        }
    });
    tensor(gradient, [tokens, experts])
}

fn token_gradient<E: Element>(kind: SumKind, row: &[E], upstream: &[E::Wide], gradient: &mut [E]) {
    let score = kind.score();
    let shared = Denominator::of(score, row.iter().map(|z| z.wide()));
    let pairs = row.iter().zip(gradient);
    match kind {
        SumKind::SquaredLse => {
            let lse = shared.largest + shared.total.logarithm();
            let factor = upstream[0] * (lse + lse);
            for (z, gradient) in pairs {
                *gradient = E::narrow(factor * shared.score(score, z.wide()));
            }
        }
        SumKind::Scores(_) => {
            let products = row.iter().zip(upstream);
            let mean: E::Wide = products
                .map(|(z, g)| *g * shared.score(score, z.wide()))
                .sum();
            for ((z, gradient), g) in pairs.zip(upstream) {
                *gradient = E::narrow(shared.slope(score, z.wide()) * (*g - mean));
            }
        }
    }
}

/// Counts the choices. See [`StatisticsOp::Count`](super::backward::StatisticsOp::Count).
pub(super) fn count(indices: &FlexTensor, experts: usize, sequences: usize) -> FlexTensor {
    let values: &[i32] = slice(indices);
    let mut counts = vec![0i32; sequences * experts];
    let length = (values.len() / sequences).max(1);
    for (values, counts) in values.chunks(length).zip(counts.chunks_mut(experts)) {
        for expert in values.iter().filter_map(|index| expert(*index, experts)) {
            counts[expert] += 1;
        }
    }
    tensor(counts, [sequences, experts])
}
