//! Tests of splits: the members of each part, their order, and the independence of the parts.

use std::sync::Arc;

use super::ConformanceError;
use super::model::MemberCall;
use super::suite::{CaseContext, CheckResult, StartedCall};
use burn_megatron_comm::{Buffer, Call, Communicator, DType, ReduceOp};

/// Returns several ways to split `ranks`, each with a name. Each rank is in exactly one part of each split.
pub(super) fn partitions(ranks: &[usize]) -> Vec<(&'static str, Vec<Vec<usize>>)> {
    let size = ranks.len();
    let chunks = |len: usize| ranks.chunks(len).map(<[usize]>::to_vec).collect();
    let reversed: Vec<usize> = ranks.iter().rev().copied().collect();
    let every_other = |first: usize| reversed.iter().skip(first).step_by(2).copied();
    let mut rotated = ranks.to_vec();
    rotated.rotate_left(size / 2);
    let filled = |parts: Vec<Vec<usize>>| -> Vec<Vec<usize>> {
        let parts = parts.into_iter();
        parts.filter(|part| !part.is_empty()).collect()
    };
    vec![
        ("whole", vec![rotated]),
        ("halves", chunks(size.div_ceil(2))),
        ("pairs", chunks(2)),
        ("singletons", chunks(1)),
        ("reversed", vec![reversed.clone()]),
        (
            "every other, reversed",
            filled(vec![every_other(1).collect(), every_other(0).collect()]),
        ),
        (
            "one and the rest",
            filled(vec![reversed[..1].to_vec(), reversed[1..].to_vec()]),
        ),
    ]
}

/// Returns a different power of two for each member of the world. A sum of these powers identifies the ranks that took
/// part.
fn bit(suite: &CaseContext<'_>, rank: usize) -> Buffer {
    let mut ranks = suite.world.group().ranks().iter();
    let index = ranks.position(|member| *member == rank).unwrap_or_default();
    vec![1i64 << (index % 62)].into()
}

/// Checks that a communicator connects the right ranks in the right order.
fn check_members(suite: &mut CaseContext<'_>, comm: &dyn Communicator) -> CheckResult {
    let ranks = comm.group().ranks();
    let bits: Vec<Buffer> = ranks.iter().map(|rank| bit(suite, *rank)).collect();
    let sum =
        |index: usize| -> MemberCall { (Call::AllReduce(ReduceOp::Sum), bits[index].clone()) };
    let numbers =
        |index: usize| -> MemberCall { (Call::AllGather, vec![ranks[index] as i64].into()) };
    let first = |index: usize| -> MemberCall { (Call::Broadcast { root: 0 }, bits[index].clone()) };
    let calls: [&dyn Fn(usize) -> MemberCall; 3] = [&sum, &numbers, &first];
    for call in calls {
        let started = suite.start(comm, call)?;
        suite.wait(started)?;
    }
    suite.barrier(comm)
}

pub(super) fn splits(suite: &mut CaseContext<'_>) -> CheckResult {
    let world = suite.world;
    check_members(suite, &**world)?;
    for (name, groups) in partitions(world.group().ranks()) {
        let part = suite.split(&**world, name, &groups)?;
        check_members(suite, &*part)?;
    }
    check_members(suite, &**world)
}

/// Splits parts again, down to one rank.
pub(super) fn nested(suite: &mut CaseContext<'_>) -> CheckResult {
    let world = suite.world;
    for (name, groups) in partitions(world.group().ranks()) {
        let outer = suite.split(&**world, name, &groups)?;
        for (name, groups) in partitions(outer.group().ranks()) {
            let inner = suite.split(&*outer, name, &groups)?;
            check_members(suite, &*inner)?;
            let own = inner.group().world_rank();
            let others = inner.group().ranks().iter().filter(|rank| **rank != own);
            let mut singles: Vec<Vec<usize>> = others.map(|rank| vec![*rank]).collect();
            singles.push(vec![own]);
            // Every member must pass the parts in the same order.
            singles.sort();
            let alone = suite.split(&*inner, "alone", &singles)?;
            check_members(suite, &*alone)?;
        }
    }
    Ok(())
}

/// Starts a message and an all-reduce on a communicator, and returns both handles.
fn start_two(
    suite: &mut CaseContext<'_>,
    comm: &dyn Communicator,
) -> Result<Vec<StartedCall>, ConformanceError> {
    let (ranks, size, own) = (comm.group().ranks(), comm.size(), comm.rank());
    let data = suite.data();
    let mut started = Vec::new();
    started.push(suite.start(comm, |index| {
        let input = data.whole(DType::I32, ranks[index], 9);
        (Call::AllReduce(ReduceOp::Sum), input)
    })?);
    if size > 1 || suite.options.self_messages {
        let (next, previous) = ((own + 1) % size, (own + size - 1) % size);
        let message = |index: usize| data.whole(DType::F32, ranks[index], 4);
        started.push(suite.send(comm, next, message(own))?);
        started.push(suite.receive(comm, previous, message(previous))?);
    }
    started.push(suite.start(comm, |index| {
        let input = data.whole(DType::F64, ranks[index], 2);
        (Call::AllGather, input)
    })?);
    Ok(started)
}

/// Checks that two groups with the same name and the same ranks are independent.
pub(super) fn same_name(suite: &mut CaseContext<'_>) -> CheckResult {
    let world = suite.world;
    for (name, groups) in partitions(world.group().ranks()) {
        let first = suite.split(&**world, name, &groups)?;
        let second = suite.split(&**world, name, &groups)?;
        let of_first = start_two(suite, &*first)?;
        let of_second = start_two(suite, &*second)?;
        suite.wait_reversed(of_second)?;
        suite.wait_reversed(of_first)?;
    }
    Ok(())
}

/// Issues calls on many groups at the same time. Each rank waits for them in a different order.
pub(super) fn at_once(suite: &mut CaseContext<'_>) -> CheckResult {
    let world = suite.world;
    let mut comms: Vec<Arc<dyn Communicator>> = vec![Arc::clone(world)];
    for (name, groups) in partitions(world.group().ranks()) {
        comms.push(suite.split(&**world, name, &groups)?);
    }
    for round in 0..4 {
        let mut started = Vec::new();
        for comm in comms.iter().chain(&comms) {
            started.extend(start_two(suite, &**comm)?);
        }
        let len = started.len();
        started.rotate_left((round * len / 4 + 3 * world.rank()) % len);
        match (round + world.rank()) % 2 {
            0 => suite.wait_reversed(started)?,
            _ => started.into_iter().try_for_each(|one| suite.wait(one))?,
        }
    }
    Ok(())
}
