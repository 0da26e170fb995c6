//! Interleaved 1F1B: each rank has several stages, whose numbers differ by multiples of p.

use std::collections::BTreeMap;

use super::super::{Action, ActionKind, ScheduleConfig};

/// Returns the (micro-batch, chunk) pairs in the order of the forwards of a rank. A chunk is the index of a
/// stage among the stages of the rank.
///
/// A group of micro-batches runs through the first chunk, then the second chunk, and so on. Then the next group
/// follows. The last group may be smaller. Backwards run the chunks in reverse order.
pub(in super::super) fn table(m: usize, v: usize, group: usize) -> Vec<(usize, usize)> {
    let firsts = (0..m).step_by(group);
    firsts
        .flat_map(|first| {
            let group = first..(first + group).min(m);
            (0..v).flat_map(move |chunk| group.clone().map(move |micro_batch| (micro_batch, chunk)))
        })
        .collect()
}

/// Returns the number of warm-up forwards of a rank that is followed by `below` ranks. Without pairs, one more forward
/// runs before the first backward. With pairs the number is increased by one, because the first backward is paired with
/// a forward of a later micro-batch.
pub(super) fn warm_up(below: usize, config: &ScheduleConfig, group: usize) -> usize {
    let (v, m) = (config.virtual_stages, config.micro_batches);
    let before = v.saturating_sub(1).saturating_mul(group);
    before
        .saturating_add(below.saturating_mul(2))
        .saturating_add(usize::from(config.pairs))
        .min(v.saturating_mul(m))
}

/// Returns the computations of one rank. Sizes must have been checked.
pub(super) fn list(rank: usize, config: &ScheduleConfig, group: usize) -> Vec<Action> {
    let (p, v) = (config.ranks, config.virtual_stages);
    let table = table(config.micro_batches, v, group);
    let forward_in = |kind, i: usize| {
        let (micro_batch, chunk) = table[i];
        Action::new(kind, chunk * p + rank, micro_batch)
    };
    let forward = |i| forward_in(ActionKind::Forward, i);
    let steady_kind = match config.pairs {
        true => ActionKind::PairedForward,
        false => ActionKind::Forward,
    };
    let backward = |i: usize| {
        let (micro_batch, chunk) = table[i];
        let stage = (v - 1 - chunk) * p + rank;
        Action::new(ActionKind::Backward, stage, micro_batch)
    };
    let warm_up = warm_up(p - rank - 1, config, group);
    let steady = table.len() - warm_up;
    let first = (0..warm_up).map(forward);
    let steady_state = (0..steady).flat_map(|i| {
        let forward = forward_in(steady_kind, warm_up + i);
        [forward, backward(i)]
    });
    let last = (steady..table.len()).map(backward);
    first.chain(steady_state).chain(last).collect()
}

/// Returns the index of the action after which the gradients of each stage of a rank are reduced.
///
/// Rank r finishes the last backward of a stage r backwards earlier than rank 0. Its reduction therefore starts r
/// backwards later, or after the last backward of the rank. All ranks then start their reductions at the same time.
pub(super) fn reductions_after(rank: usize, actions: &[Action]) -> BTreeMap<usize, usize> {
    let backwards: Vec<_> = (0..actions.len())
        .filter(|position| actions[*position].kind == ActionKind::Backward)
        .collect();
    let delayed = |nth: usize| backwards[(nth + rank).min(backwards.len() - 1)];
    let by_stage = backwards.iter().enumerate();
    by_stage
        .map(|(nth, position)| (actions[*position].stage, delayed(nth)))
        .collect()
}
