//! Tests that invalid calls are rejected on the rank that issues them, without side effects.

use super::suite::{CaseContext, CheckResult, describe};
use burn_megatron_comm::{Buffer, Call, Communicator, DType, ReduceOp};

/// Returns calls that are invalid in a group of this size.
fn wrong_calls(size: usize) -> Vec<(Call, Buffer)> {
    let ones = |len: usize| Buffer::from(vec![1u8; len]);
    let even = || vec![1; size];
    let exchange = |send: Vec<usize>, receive: Vec<usize>| Call::AllToAll { send, receive };
    let more = [vec![1; size], vec![0]].concat();
    let mut calls = vec![
        (Call::AllReduce(ReduceOp::Average), vec![1i32; 4].into()),
        (Call::ReduceScatter(ReduceOp::Average), ones(size)),
        (Call::Broadcast { root: size }, ones(2)),
        (Call::Send { to: size }, ones(2)),
        (Call::Barrier, ones(1)),
        (exchange(more.clone(), even()), ones(size)),
        (exchange(even(), more), ones(size)),
        (exchange(even(), even()), ones(size + 1)),
        (exchange(vec![usize::MAX; size], even()), ones(size)),
        (exchange(even(), vec![2; size]), ones(size)),
    ];
    let (dtype, len) = (DType::U8, 2);
    for (from, input) in [(size, ones(0)), (0, ones(1))] {
        calls.push((Call::Receive { from, dtype, len }, input));
    }
    if size > 1 {
        calls.push((Call::ReduceScatter(ReduceOp::Sum), ones(2 * size + 1)));
    }
    calls
}

/// Returns lists of groups that are not a partition of the ranks.
fn wrong_parts(ranks: &[usize]) -> Vec<Vec<Vec<usize>>> {
    let non_member = ranks.iter().max().map_or(0, |rank| rank + 1);
    let twice = vec![ranks.to_vec(), ranks[..1].to_vec()];
    let with_non_member = vec![[ranks, &[non_member]].concat()];
    let one_missing = vec![ranks[1..].to_vec()];
    vec![twice, with_non_member, one_missing]
}

/// Issues each invalid call alone, and as the second of two calls that are started together. The communicator must work
/// as before after each invalid call.
pub(super) fn refused(suite: &mut CaseContext<'_>) -> CheckResult {
    let world = suite.world;
    let pairs: Vec<Vec<usize>> = world.group().ranks().chunks(2).map(<[_]>::to_vec).collect();
    let part = suite.split(&**world, "pairs", &pairs)?;
    for comm in [world, &part] {
        check_group(suite, &**comm)?;
    }
    Ok(())
}

fn check_group(suite: &mut CaseContext<'_>, comm: &dyn Communicator) -> CheckResult {
    for (call, input) in wrong_calls(comm.size()) {
        let text = describe(comm, &call, &input);
        let alone = comm.start(call.clone(), input.clone());
        suite.refused(&text, alone)?;
        let good = (Call::AllGather, Buffer::from(vec![1i64; 3]));
        let both = comm.start_all(vec![good, (call, input)]);
        suite.refused(&format!("start_all with {text}"), both)?;
        suite.whole(comm, &Call::AllGather, DType::I64, 3)?;
    }
    for groups in wrong_parts(comm.group().ranks()) {
        let text = format!("split of {} into {groups:?}", comm.group());
        let part = comm.split("wrong", &groups);
        suite.refused(&text, part)?;
        suite.whole(comm, &Call::AllReduce(ReduceOp::Sum), DType::F32, 2)?;
    }
    Ok(())
}
