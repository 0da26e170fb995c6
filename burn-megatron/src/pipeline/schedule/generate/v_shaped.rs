//! Schedules whose two stages per rank form a V: with p ranks, rank r holds the stages r and 2p-1-r.
//!
//! Both kinds of V-shaped schedules need at least 2p micro-batches. If there are fewer micro-batches, a schedule for 2p
//! micro-batches is generated and the excess micro-batches are removed, which does not violate any dependency.

use super::{Action, RankProgram};

/// The chunk on the way down the V, and the chunk on the way up.
const DOWN: usize = 0;
const UP: usize = 1;

fn rank_program(rank: usize, p: usize) -> RankProgram {
    RankProgram::new([rank, 2 * p - 1 - rank])
}

/// Returns the computations of ZB-V. A rank holds at most 2p stage activations in memory. They belong to the same
/// number of layers as the activations on the first rank of 1F1B.
pub(super) fn zb_v(rank: usize, p: usize, m: usize) -> Vec<Action> {
    let generated = m.max(2 * p);
    let mut program = rank_program(rank, p);
    // Forwards go down until the first micro-batch returns. Then up and down alternate, followed by the first
    // gradients of the upward stage.
    for _ in 0..2 * (p - rank) - 1 {
        program.forward(DOWN);
    }
    for _ in 0..rank {
        program.forward(UP).forward(DOWN);
    }
    for _ in 0..p - rank {
        program.forward(UP).input_gradient(UP).weight_gradient();
    }
    // The steady state continues as long as forwards are left.
    for up in p..generated {
        if up + p - rank - 1 < generated {
            program.forward(DOWN);
        }
        program
            .input_gradient(DOWN)
            .weight_gradient()
            .forward(UP)
            .input_gradient(UP)
            .weight_gradient();
    }
    // In the cool-down, input gradients come first, and deferred weight gradients fill the end.
    for _ in 0..rank {
        program.input_gradient(DOWN).input_gradient(UP);
    }
    for _ in 0..p - rank {
        program.input_gradient(DOWN).weight_gradient_of(DOWN);
    }
    program.finish(m)
}

/// Returns the computations of DualPipeV. Forwards of one stage are next to backwards of the other stage, or paired
/// with them. A rank holds at most 2p+1 stage activations in memory.
pub(super) fn dualpipe_v(rank: usize, p: usize, m: usize, pairs: bool) -> Vec<Action> {
    let generated = m.max(2 * p);
    let below = p - rank - 1;
    let mut program = rank_program(rank, p);
    for _ in 0..2 * below {
        program.forward(DOWN);
    }
    for _ in 0..=rank {
        program.forward(DOWN).forward(UP);
    }
    // The first backwards are split, so that earlier ranks receive their gradients sooner.
    for _ in 0..below {
        program.input_gradient(UP).weight_gradient().forward(UP);
    }
    for i in 0..generated + rank + 1 - 2 * p {
        // The last rank has just computed the input of its first backward, so a pair would delay it.
        let first = pairs && (i > 0 || below > 0);
        program
            .forward_in(DOWN, first)
            .backward(UP)
            .forward_in(UP, pairs)
            .backward(DOWN);
    }
    for _ in 0..below {
        program.backward(UP).forward_in(UP, pairs).backward(DOWN);
    }
    // Half of the last backwards of both stages are split: their weight gradients fill the end.
    for i in 0..2 * (rank + 1) {
        let chunk = if i % 2 == 0 { UP } else { DOWN };
        if i <= rank {
            program.backward(chunk);
        } else {
            program.input_gradient(chunk);
        }
    }
    for _ in 0..below {
        program.weight_gradient().input_gradient(DOWN);
    }
    program.finish(m)
}
