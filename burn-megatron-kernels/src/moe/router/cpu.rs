//! The CPU implementation. It processes tokens in parallel.

use burn::backend::flex::FlexTensor;

use super::{ExpertGroups, LOWEST, RouterOptions, ScoreFunction};
use crate::cpu::{Element, Real, for_row_tasks, slice, tensor};
use crate::moe::permutation::sort::expert;
use crate::moe::score::cpu::Denominator;

/// Calls `work` with the index and the values of each row of `output`. The rows are processed in parallel if there are
/// enough of them.
fn each_row<T: Send>(output: &mut [T], width: usize, work: impl Fn(usize, &mut [T]) + Sync + Send) {
    // A score takes tens of instructions.
    for_row_tasks(output, width, 16, |first, output| {
        let rows = output.chunks_exact_mut(width).enumerate();
        rows.for_each(|(i, row)| work(first + i, row));
    });
}

/// Chooses experts. See [`RouterOp`](super::backward::RouterOp).
pub(super) fn choose<E: Element>(options: &RouterOptions, inputs: &[FlexTensor]) -> FlexTensor {
    let [tokens, experts] = sizes(&inputs[0]);
    let logits = slice::<E>(&inputs[0]);
    let bias = inputs.get(1).map(slice::<E::Wide>);
    let lowest = E::Wide::of(f64::from(LOWEST));
    let mut indices = vec![0i32; tokens * options.top_k];
    each_row(&mut indices, options.top_k, |token, chosen| {
        let row = &logits[token * experts..(token + 1) * experts];
        let mut scores: Vec<E::Wide> = row.iter().map(|z| z.wide()).collect();
        if options.score != ScoreFunction::Softmax {
            let all = scores.iter().copied();
            let denominator = match options.score {
                ScoreFunction::PreSoftmax => Denominator::of(options.score, all),
                _ => Denominator::one(),
            };
            scores
                .iter_mut()
                .for_each(|z| *z = denominator.score(options.score, *z));
        }
        if let Some(bias) = bias {
            scores
                .iter_mut()
                .zip(bias)
                .for_each(|(score, bias)| *score += *bias);
        }
        for score in &mut scores {
            *score = if *score > lowest { *score } else { lowest };
        }
        let open = options.groups.map(|groups| open_groups(&scores, groups));
        let is_open = |expert: usize| {
            let size = |open: &Vec<bool>| experts / open.len();
            open.as_ref().is_none_or(|open| open[expert / size(open)])
        };
        let mut last = None;
        for chosen in chosen {
            let candidates = (0..experts).filter(|expert| is_open(*expert));
            let next = next(candidates.map(|expert| (scores[expert], expert)), last);
            *chosen = next.1 as i32;
            last = Some(next);
        }
    });
    tensor(indices, [tokens, options.top_k])
}

/// Returns the first candidate after `last` in the order of the ranking: larger scores first, then smaller indices. The
/// candidates must be given in the order of their indices.
fn next<W: Real>(
    candidates: impl Iterator<Item = (W, usize)>,
    last: Option<(W, usize)>,
) -> (W, usize) {
    let behind = |(score, index): (W, usize)| {
        last.is_none_or(|(bound, at)| score < bound || score == bound && index > at)
    };
    let candidates = candidates.filter(|candidate| behind(*candidate));
    let best = candidates.reduce(|best, other| if other.0 > best.0 { other } else { best });
    match best {
        Some(best) => best,
        None => unreachable!("the options were checked for this number of experts"),
    }
}

/// Returns whether the experts of each group may be chosen.
fn open_groups<W: Real>(scores: &[W], groups: ExpertGroups) -> Vec<bool> {
    let members = scores.chunks_exact(scores.len() / groups.groups);
    let score = |members: &[W]| {
        let (mut sum, mut last) = (W::ZERO, None);
        for _ in 0..groups.score.terms() {
            let best = next(members.iter().copied().zip(0..), last);
            sum += best.0;
            last = Some(best);
        }
        sum
    };
    let of_groups: Vec<W> = members.map(score).collect();
    let mut open = vec![false; groups.groups];
    let mut last = None;
    for _ in 0..groups.chosen {
        let best = next(of_groups.iter().copied().zip(0..), last);
        open[best.1] = true;
        last = Some(best);
    }
    open
}

fn sizes(logits: &FlexTensor) -> [usize; 2] {
    let shape = logits.layout().shape();
    [shape[0], shape[1]]
}

/// Returns the divisor of a token's weights.
#[inline(always)]
fn denominator<W: Real>(
    options: &RouterOptions,
    logits: impl Iterator<Item = W> + Clone,
    chosen: impl Iterator<Item = W> + Clone,
) -> Denominator<W> {
    match options.score {
        ScoreFunction::PreSoftmax => Denominator::of(options.score, logits),
        score if options.normalizes() => Denominator::of(score, chosen),
        _ => Denominator::one(),
    }
}

/// Computes the weights. See [`RouterOp`](super::backward::RouterOp).
pub(super) fn weights<E: Element>(options: &RouterOptions, inputs: &[FlexTensor]) -> FlexTensor {
    let [tokens, experts] = sizes(&inputs[0]);
    let top_k = options.top_k;
    let logits = slice::<E>(&inputs[0]);
    let indices: &[i32] = slice(&inputs[1]);
    let factor = E::Wide::of(options.scaling_factor);
    let mut weights = vec![E::Wide::ZERO; tokens * top_k];
    each_row(&mut weights, top_k, |token, weights| {
        let row = &logits[token * experts..(token + 1) * experts];
        let slots = &indices[token * top_k..(token + 1) * top_k];
        let logit = |index: &i32| Some(row[expert(*index, experts)?].wide());
        let all = row.iter().map(|z| z.wide());
        let shared = denominator(options, all, slots.iter().filter_map(logit));
        for (weight, index) in weights.iter_mut().zip(slots) {
            if let Some(z) = logit(index) {
                *weight = factor * shared.score(options.score, z);
            }
        }
    });
    tensor(weights, [tokens, top_k])
}

/// Computes the gradient. See [`RouterOp`](super::backward::RouterOp).
pub(super) fn gradient<E: Element>(options: &RouterOptions, inputs: &[FlexTensor]) -> FlexTensor {
    let [tokens, experts] = sizes(&inputs[0]);
    let (top_k, score) = (options.top_k, options.score);
    let logits = slice::<E>(&inputs[0]);
    let indices: &[i32] = slice(&inputs[1]);
    let upstream = slice::<E::Wide>(&inputs[2]);
    let factor = E::Wide::of(options.scaling_factor);
    let mut gradient = vec![E::narrow(E::Wide::ZERO); logits.len()];
    each_row(&mut gradient, experts, |token, gradient| {
        let row = &logits[token * experts..(token + 1) * experts];
        let of_token = token * top_k..(token + 1) * top_k;
        let slots = indices[of_token.clone()].iter().zip(&upstream[of_token]);
        let slots = slots.filter_map(|(index, g)| Some((expert(*index, experts)?, *g)));
        let all = row.iter().map(|z| z.wide());
        let chosen = slots.clone().map(|(expert, _)| row[expert].wide());
        let shared = denominator(options, all, chosen);
        let mut mean = E::Wide::ZERO;
        if options.normalizes() {
            for (expert, g) in slots.clone() {
                mean += g * shared.score(score, row[expert].wide());
            }
        }
        if score == ScoreFunction::PreSoftmax {
            for (gradient, z) in gradient.iter_mut().zip(row) {
                let slope = shared.slope(score, z.wide());
                *gradient = E::narrow(factor * slope * -mean);
            }
        }
        for (expert, g) in slots {
            let slope = shared.slope(score, row[expert].wide());
            gradient[expert] = E::narrow(factor * slope * (g - mean));
        }
    });
    tensor(gradient, [tokens, experts])
}
