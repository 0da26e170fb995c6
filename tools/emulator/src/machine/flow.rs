//! Where lanes that part meet again.
//!
//! Behind a branch it is the first instruction that every way to the end of the kernel passes: the
//! branch's immediate post-dominator, where a compiler for a GPU makes lanes wait for each other.
//!
//! Source: Cooper, Harvey, Kennedy, *A Simple, Fast Dominance Algorithm*, run on the graph backwards.

use super::program::{Action, Op};

/// There is no such instruction.
pub(super) const NOWHERE: usize = usize::MAX;

/// For each instruction the one where lanes that part there meet again.
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
    // Nobody waits for others to end.
    let meets = |at: usize| at < end && !ops[at].ends();
    (0..end)
        .map(|at| if meets(above[at]) { above[at] } else { NOWHERE })
        .collect()
}

/// Returns the instructions that may follow an instruction; the one behind the last is the end.
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

/// The instructions from the end backwards, each before those that come to it alone.
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

/// The first instruction that lies behind both.
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
