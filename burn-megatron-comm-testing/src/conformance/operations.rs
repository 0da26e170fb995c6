//! Tests of every collective with every element type and length.

use super::ConformanceError;
use super::messages::pass_on;
use super::model::MemberCall;
use super::suite::{CaseContext, CheckResult, StartedCall};
use super::values::TestData;
use burn_megatron_comm::{Call, DType, ReduceOp};

const OPS: [ReduceOp; 3] = [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min];

/// Runs `check` for every element type and length in the options.
pub(super) fn sweep(
    suite: &mut CaseContext<'_>,
    check: impl Fn(&mut CaseContext<'_>, DType, usize) -> CheckResult,
) -> CheckResult {
    let options = suite.options;
    for dtype in &options.dtypes {
        for len in &options.sizes {
            check(suite, *dtype, *len)?;
        }
    }
    Ok(())
}

pub(super) fn all_reduce(suite: &mut CaseContext<'_>) -> CheckResult {
    let world = suite.world;
    sweep(suite, |suite, dtype, len| {
        OPS.into_iter()
            .try_for_each(|op| suite.whole(&**world, &Call::AllReduce(op), dtype, len))
    })
}

pub(super) fn all_gather(suite: &mut CaseContext<'_>) -> CheckResult {
    let world = suite.world;
    sweep(suite, |suite, dtype, len| {
        suite.whole(&**world, &Call::AllGather, dtype, len)
    })
}

pub(super) fn reduce_scatter(suite: &mut CaseContext<'_>) -> CheckResult {
    let world = suite.world;
    sweep(suite, |suite, dtype, len| {
        let whole = len.next_multiple_of(world.size());
        OPS.into_iter()
            .try_for_each(|op| suite.whole(&**world, &Call::ReduceScatter(op), dtype, whole))
    })
}

/// Broadcasts from every member in turn.
pub(super) fn broadcast(suite: &mut CaseContext<'_>) -> CheckResult {
    let world = suite.world;
    sweep(suite, |suite, dtype, len| {
        (0..world.size())
            .try_for_each(|root| suite.whole(&**world, &Call::Broadcast { root }, dtype, len))
    })
}

/// Returns the call of the member with index `index` in an all-to-all. Member `from` sends `count(from, to)` elements
/// to member `to`.
pub(super) fn exchange(
    data: TestData,
    dtype: DType,
    ranks: &[usize],
    index: usize,
    count: impl Fn(usize, usize) -> usize,
) -> MemberCall {
    let members = 0..ranks.len();
    let send: Vec<usize> = members.clone().map(|to| count(index, to)).collect();
    let receive = members.map(|from| count(from, index)).collect();
    let input = data.whole(dtype, ranks[index], send.iter().sum());
    (Call::AllToAll { send, receive }, input)
}

/// Starts an all-to-all on all ranks with new input data.
fn start_exchange(
    suite: &mut CaseContext<'_>,
    dtype: DType,
    count: impl Fn(usize, usize) -> usize,
) -> Result<StartedCall, ConformanceError> {
    let (world, data) = (suite.world, suite.data());
    let ranks = world.group().ranks();
    suite.start(&**world, |index| {
        exchange(data, dtype, ranks, index, &count)
    })
}

/// Runs all-to-alls with even counts, and with uneven counts that include zeros.
pub(super) fn all_to_all(suite: &mut CaseContext<'_>) -> CheckResult {
    let size = suite.world.size();
    sweep(suite, |suite, dtype, len| {
        let each = len.div_ceil(size);
        let even = |_: usize, _: usize| each;
        let uneven = |from: usize, to: usize| each * ((2 * from + to) % 3) / 2 + from % 2;
        let counts: [&dyn Fn(usize, usize) -> usize; 2] = [&even, &uneven];
        for count in counts {
            let started = start_exchange(suite, dtype, count)?;
            suite.wait(started)?;
        }
        Ok(())
    })
}

/// Runs one-sided all-to-alls: one member sends to all members, all members send to one member, or each member sends to
/// one other member.
pub(super) fn one_sided(suite: &mut CaseContext<'_>) -> CheckResult {
    let size = suite.world.size();
    sweep(suite, |suite, dtype, len| {
        for chosen in 0..size {
            let gives = |from: usize, _: usize| if from == chosen { len } else { 0 };
            let gets = |_: usize, to: usize| if to == chosen { len } else { 0 };
            let next = |from: usize, to: usize| {
                let step = (to + size - from) % size;
                if step == chosen { len } else { 0 }
            };
            let counts: [&dyn Fn(usize, usize) -> usize; 3] = [&gives, &gets, &next];
            for count in counts {
                let started = start_exchange(suite, dtype, count)?;
                suite.wait(started)?;
            }
        }
        Ok(())
    })
}

/// Runs several all-to-alls with different counts at the same time. In some of them, all elements are sent to one
/// member, no elements are sent, or one member neither sends nor receives.
pub(super) fn changing(suite: &mut CaseContext<'_>) -> CheckResult {
    let size = suite.world.size();
    sweep(suite, |suite, dtype, len| {
        let mut started = vec![];
        for chosen in 0..size {
            let gets = |_: usize, to: usize| if to == chosen { len } else { 0 };
            let nothing = |_: usize, _: usize| 0;
            let without = |from: usize, to: usize| {
                let is_in = from != chosen && to != chosen;
                if is_in {
                    (from + 2 * to + chosen) % 3 * len / 2
                } else {
                    0
                }
            };
            let counts: [&dyn Fn(usize, usize) -> usize; 3] = [&gets, &nothing, &without];
            for count in counts {
                started.push(start_exchange(suite, dtype, count)?);
            }
        }
        suite.wait_reversed(started)
    })
}

/// Runs collectives on buffers of several MB, with the element types in which models are trained.
pub(super) fn long(suite: &mut CaseContext<'_>) -> CheckResult {
    let (world, options) = (suite.world, suite.options);
    let size = world.size();
    let len = options.long.next_multiple_of(size);
    for dtype in [DType::F32, DType::BF16] {
        if !options.dtypes.contains(&dtype) {
            continue;
        }
        for (call, len) in [
            (Call::AllReduce(ReduceOp::Sum), len),
            (Call::ReduceScatter(ReduceOp::Sum), len),
            (Call::AllGather, len / size),
            (Call::Broadcast { root: size - 1 }, len),
        ] {
            suite.whole(&**world, &call, dtype, len)?;
        }
        let each = len / size;
        let started = start_exchange(suite, dtype, |_, _| each)?;
        suite.wait(started)?;
        pass_on(suite, dtype, len)?;
    }
    Ok(())
}
