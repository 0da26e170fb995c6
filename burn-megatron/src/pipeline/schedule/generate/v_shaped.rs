//! Schedules whose two stages per rank form a V: rank r of p holds stages r and 2p-1-r.
//!
//! Both are written for at least 2p micro-batches. With fewer, those that are not there are left
//! out of a schedule of 2p, which breaks no dependency.

use super::{Action, Lane};

/// The rank's stage on the way down the V, and the one on the way up.
const DOWN: usize = 0;
const UP: usize = 1;

fn lane(rank: usize, p: usize) -> Lane {
    Lane::new([rank, 2 * p - 1 - rank])
}

/// ZB-V: never more than 2p stage-activations on a rank, as many layers' worth as 1F1B keeps on its
/// first.
pub(super) fn zb_v(rank: usize, p: usize, m: usize) -> Vec<Action> {
    let written = m.max(2 * p);
    let mut lane = lane(rank, p);
    // Down until the first micro-batch comes up again, then up and down by turns, then the first
    // gradients, which come down the way that is still going up.
    for _ in 0..2 * (p - rank) - 1 {
        lane.forward(DOWN);
    }
    for _ in 0..rank {
        lane.forward(UP).forward(DOWN);
    }
    for _ in 0..p - rank {
        lane.forward(UP).input(UP).weight();
    }
    // One of each in turn, as long as there are micro-batches to start or to bring up.
    for up in p..written {
        if up + p - rank - 1 < written {
            lane.forward(DOWN);
        }
        lane.input(DOWN).weight().forward(UP).input(UP).weight();
    }
    // Gradients pass on without delay; weight gradients that are put off fill the end.
    for _ in 0..rank {
        lane.input(DOWN).input(UP);
    }
    for _ in 0..p - rank {
        lane.input(DOWN).weight_of(DOWN);
    }
    while lane.put_off() > 0 {
        lane.weight();
    }
    lane.finish(m)
}

/// DualPipeV: forward passes of one stage next to backward passes of the other, which an engine may
/// overlap; at most 2p+1 stage-activations on a rank.
pub(super) fn dualpipe_v(rank: usize, p: usize, m: usize) -> Vec<Action> {
    let written = m.max(2 * p);
    let below = p - rank - 1;
    let mut lane = lane(rank, p);
    for _ in 0..2 * below {
        lane.forward(DOWN);
    }
    for _ in 0..=rank {
        lane.forward(DOWN).forward(UP);
    }
    // The first gradients are split, so that the ranks above get theirs sooner.
    for _ in 0..below {
        lane.input(UP).weight().forward(UP);
    }
    for _ in 0..written + rank + 1 - 2 * p {
        lane.forward(DOWN).backward(UP).forward(UP).backward(DOWN);
    }
    for _ in 0..below {
        lane.backward(UP).forward(UP).backward(DOWN);
    }
    // Half of the last gradients on both ways are split: their weights fill the end.
    for i in 0..2 * (rank + 1) {
        let place = if i % 2 == 0 { UP } else { DOWN };
        if i <= rank {
            lane.backward(place);
        } else {
            lane.input(place);
        }
    }
    for _ in 0..below {
        lane.weight().input(DOWN);
    }
    while lane.put_off() > 0 {
        lane.weight();
    }
    lane.finish(m)
}
