//! Interleaved 1F1B: several stages on each rank, p apart.

use super::super::{Action, ActionKind, ScheduleConfig};

/// The (micro-batch, place) pairs in the order in which a rank takes them forward; a place counts
/// the stages of the rank.
///
/// A group of micro-batches passes the first place, then the second, and so on; then comes the next
/// group, the last of which may be smaller. Backward takes the places the other way round.
pub(in super::super) fn table(m: usize, v: usize, group: usize) -> Vec<(usize, usize)> {
    let firsts = (0..m).step_by(group);
    firsts
        .flat_map(|first| {
            let group = first..(first + group).min(m);
            (0..v).flat_map(move |place| group.clone().map(move |micro_batch| (micro_batch, place)))
        })
        .collect()
}

/// Forward passes before the first backward pass of a rank with `below` ranks below it, but for
/// the one right before it.
pub(super) fn warm_up(below: usize, config: &ScheduleConfig, group: usize) -> usize {
    let (v, m) = (config.virtual_stages, config.micro_batches);
    let before = v.saturating_sub(1).saturating_mul(group);
    before
        .saturating_add(below.saturating_mul(2))
        .min(v.saturating_mul(m))
}

/// What one rank computes. The sizes are checked.
pub(super) fn list(rank: usize, config: &ScheduleConfig, group: usize) -> Vec<Action> {
    let (p, v) = (config.ranks, config.virtual_stages);
    let table = table(config.micro_batches, v, group);
    let forward = |i: usize| {
        let (micro_batch, place) = table[i];
        Action::new(ActionKind::Forward, place * p + rank, micro_batch)
    };
    let backward = |i: usize| {
        let (micro_batch, place) = table[i];
        let stage = (v - 1 - place) * p + rank;
        Action::new(ActionKind::Backward, stage, micro_batch)
    };
    let warm_up = warm_up(p - rank - 1, config, group);
    let steady = table.len() - warm_up;
    let first = (0..warm_up).map(forward);
    let by_turns = (0..steady).flat_map(|i| [forward(warm_up + i), backward(i)]);
    let last = (steady..table.len()).map(backward);
    first.chain(by_turns).chain(last).collect()
}
