//! Computes where diverged lanes reconverge.
//!
//! Lanes reconverge at the first instruction behind a branch that every path to the end of the kernel passes. This is
//! the immediate post-dominator of the branch. Compilers for GPUs make lanes wait for each other there.
//!
//! Source: Cooper, Harvey, Kennedy, *A Simple, Fast Dominance Algorithm*, applied to the reversed graph.

use super::program::{Action, Op};

/// No such instruction exists.
pub(super) const NOWHERE: usize = usize::MAX;

/// Returns, for each instruction, the instruction at which lanes that diverge there reconverge.
pub(crate) fn reconvergence(ops: &[Op]) -> Vec<usize> {
    let end = ops.len();
    let next: Vec<Vec<usize>> = (0..end).map(|at| successors(ops, at)).collect();
    let order = backwards(&next);
    let mut rank = vec![NOWHERE; end + 1];
    for (place, node) in order.iter().enumerate() {
        rank[*node] = place;
    }
    let mut above = vec![NOWHERE; end + 1];
    above[end] = end;
    let mut changed = true;
    while changed {
        changed = false;
        for node in order.iter().copied().skip(1) {
            let known = next[node].iter().filter(|to| above[**to] != NOWHERE);
            let new = known.copied().reduce(|a, b| common(a, b, &above, &rank));
            let new = new.unwrap_or(NOWHERE);
            changed |= above[node] != new;
            above[node] = new;
        }
    }
    // Lanes do not wait for each other at exits.
    let meets = |at: usize| at < end && !ops[at].ends();
    (0..end)
        .map(|at| if meets(above[at]) { above[at] } else { NOWHERE })
        .collect()
}

/// Returns the instructions that may follow an instruction. The index behind the last instruction is the end.
fn successors(ops: &[Op], at: usize) -> Vec<usize> {
    let op = &ops[at];
    let mut next = match &op.action {
        Action::Jump(target) => vec![*target],
        Action::Table { targets, .. } => targets.clone(),
        Action::Exit => vec![ops.len()],
        _ => return vec![at + 1],
    };
    if op.guard.is_some() {
        next.push(at + 1);
    }
    next
}

/// Returns the instructions from the end backwards. An instruction comes before the instructions that lead only to it.
fn backwards(next: &[Vec<usize>]) -> Vec<usize> {
    let end = next.len();
    let mut before = vec![Vec::new(); end + 1];
    for (from, to) in next.iter().enumerate() {
        to.iter().for_each(|to| before[*to].push(from));
    }
    let mut seen = vec![false; end + 1];
    seen[end] = true;
    let (mut path, mut order) = (vec![(end, 0)], Vec::new());
    while let Some((node, done)) = path.last_mut() {
        match before[*node].get(*done).copied() {
            Some(from) => {
                *done += 1;
                if !std::mem::replace(&mut seen[from], true) {
                    path.push((from, 0));
                }
            }
            None => {
                order.push(*node);
                path.pop();
            }
        }
    }
    order.reverse();
    order
}

/// Returns the first instruction that lies behind both instructions.
fn common(mut a: usize, mut b: usize, above: &[usize], rank: &[usize]) -> usize {
    while a != b {
        while rank[a] > rank[b] {
            a = above[a];
        }
        while rank[b] > rank[a] {
            b = above[b];
        }
    }
    a
}
