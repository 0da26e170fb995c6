//! Schedules with one stage per rank.

use super::{Action, RankProgram};

/// Returns all forwards, then all backwards, both in the order of the micro-batches.
pub(super) fn gpipe(rank: usize, m: usize) -> Vec<Action> {
    let mut program = RankProgram::new([rank]);
    for _ in 0..m {
        program.forward(0);
    }
    for _ in 0..m {
        program.backward(0);
    }
    program.finish(m)
}

/// Returns `warm_up` forwards, at most `m`. Then forwards and backwards alternate, or run in pairs.
pub(super) fn one_f_one_b(rank: usize, warm_up: usize, m: usize, pairs: bool) -> Vec<Action> {
    let mut program = RankProgram::new([rank]);
    for _ in 0..warm_up {
        program.forward(0);
    }
    for _ in warm_up..m {
        program.forward_in(0, pairs).backward(0);
    }
    for _ in 0..warm_up {
        program.backward(0);
    }
    program.finish(m)
}

/// Returns 1F1B in which rank r defers r weight gradients.
///
/// As in 1F1B, rank r has p-r micro-batches whose forward has run and whose input gradient has not run. In addition, r
/// micro-batches wait for their weight gradient. Every rank therefore holds the activations of p micro-batches, like
/// the first rank of 1F1B. The r deferred weight gradients fill the cool-down, in which the rank waits for earlier
/// ranks.
pub(super) fn zb_h1(rank: usize, p: usize, m: usize) -> Vec<Action> {
    let warm_up = (p - rank - 1).min(m);
    let mut program = RankProgram::new([rank]);
    for _ in 0..warm_up {
        program.forward(0);
    }
    for micro_batch in 0..m {
        if warm_up + micro_batch < m {
            program.forward(0);
        }
        program.input_gradient(0);
        if micro_batch >= rank {
            program.weight_gradient();
        }
    }
    program.finish(m)
}
