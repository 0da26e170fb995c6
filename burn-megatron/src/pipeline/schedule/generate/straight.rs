//! Schedules with one stage on each rank.

use super::{Action, Lane};

/// All forward, then all backward, both in the order of the micro-batches.
pub(super) fn gpipe(rank: usize, m: usize) -> Vec<Action> {
    let mut lane = Lane::new([rank]);
    for _ in 0..m {
        lane.forward(0);
    }
    for _ in 0..m {
        lane.backward(0);
    }
    lane.finish(m)
}

/// Fills the stages below, then goes forward and backward by turns.
pub(super) fn one_f_one_b(rank: usize, p: usize, m: usize) -> Vec<Action> {
    let warm_up = (p - rank - 1).min(m);
    let mut lane = Lane::new([rank]);
    for _ in 0..warm_up {
        lane.forward(0);
    }
    for _ in warm_up..m {
        lane.forward(0).backward(0);
    }
    for _ in 0..warm_up {
        lane.backward(0);
    }
    lane.finish(m)
}

/// 1F1B in which rank r keeps r weight gradients back.
///
/// Rank r has p-r micro-batches between forward and input gradient, as in 1F1B, and r more until
/// their weight gradient: p on every rank, what 1F1B has on the first. Those r fill the end, where
/// the rank waits for the ranks above it to finish.
pub(super) fn zb_h1(rank: usize, p: usize, m: usize) -> Vec<Action> {
    let warm_up = (p - rank - 1).min(m);
    let mut lane = Lane::new([rank]);
    for _ in 0..warm_up {
        lane.forward(0);
    }
    for micro_batch in 0..m {
        if warm_up + micro_batch < m {
            lane.forward(0);
        }
        lane.input(0);
        if micro_batch >= rank {
            lane.weight();
        }
    }
    while lane.put_off() > 0 {
        lane.weight();
    }
    lane.finish(m)
}
