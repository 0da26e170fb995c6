//! Tests of several calls in flight: waits in any order, dropped handles, calls that are started together, and
//! barriers.

use std::thread::sleep;
use std::time::{Duration, Instant};

use super::ConformanceError;
use super::model::{self, MemberCall};
use super::operations::exchange;
use super::suite::{CaseContext, CheckResult, StartedCall, describe};
use burn_megatron_comm::{Buffer, Call, Communicator, DType, MIN_POOLED_LEN, Pending, ReduceOp};

/// Starts one collective of each kind with new input data.
fn start_each(
    suite: &mut CaseContext<'_>,
    comm: &dyn Communicator,
) -> Result<Vec<StartedCall>, ConformanceError> {
    let ranks = comm.group().ranks();
    let size = ranks.len();
    let calls = [
        Call::AllReduce(ReduceOp::Sum),
        Call::AllGather,
        Call::ReduceScatter(ReduceOp::Max),
        Call::Broadcast { root: size - 1 },
    ];
    let mut started = Vec::new();
    for call in calls {
        let data = suite.data();
        let input = |index: usize| data.whole(DType::F32, ranks[index], 3 * size);
        started.push(suite.start(comm, |index| (call.clone(), input(index)))?);
    }
    let data = suite.data();
    let count = |from: usize, to: usize| (from + 2 * to) % 4;
    started.push(suite.start(comm, |index| {
        exchange(data, DType::I64, ranks, index, count)
    })?);
    let barrier = |_| (Call::Barrier, Buffer::empty(DType::U8));
    started.push(suite.start(comm, barrier)?);
    Ok(started)
}

/// Waits for calls in a different order on each rank.
pub(super) fn any_order(suite: &mut CaseContext<'_>) -> CheckResult {
    let world = suite.world;
    for round in 0..3 {
        let mut started = start_each(suite, &**world)?;
        started.extend(start_each(suite, &**world)?);
        let len = started.len();
        started.rotate_left((round + 5 * world.rank()) % len);
        match (world.rank() + round) % 2 {
            0 => suite.wait_reversed(started)?,
            _ => started.into_iter().try_for_each(|one| suite.wait(one))?,
        }
    }
    Ok(())
}

/// Checks that a rank that drops a handle still takes part in the collective. The other ranks must get their results,
/// and later calls must keep their order.
pub(super) fn dropped(suite: &mut CaseContext<'_>) -> CheckResult {
    let world = suite.world;
    for round in 0..world.size() {
        let started = start_each(suite, &**world)?;
        for (number, call) in started.into_iter().enumerate() {
            if (number + round) % world.size() == world.rank() {
                drop(call)
            } else {
                suite.wait(call)?
            }
        }
        suite.barrier(&**world)?;
    }
    let last = start_each(suite, &**world)?;
    suite.wait_reversed(last)
}

/// Starts several collectives together, and other collectives separately before and after them.
pub(super) fn started_as_one(suite: &mut CaseContext<'_>) -> CheckResult {
    let world = suite.world;
    let (ranks, size) = (world.group().ranks(), world.size());
    let empty = suite.start_all(&**world, &[])?;
    suite.wait_reversed(empty)?;
    for len in [0, 1, 2000] {
        let before = start_each(suite, &**world)?;
        let data = [suite.data(), suite.data(), suite.data(), suite.data()];
        let scatter = |index: usize| -> MemberCall {
            let input = data[0].whole(DType::F32, ranks[index], size * len);
            (Call::ReduceScatter(ReduceOp::Sum), input)
        };
        let gather = |index: usize| -> MemberCall {
            let input = data[1].whole(DType::BF16, ranks[index], len);
            (Call::AllGather, input)
        };
        let reduce = |index: usize| -> MemberCall {
            let input = data[2].whole(DType::I64, ranks[index], len);
            (Call::AllReduce(ReduceOp::Max), input)
        };
        let swap = |index: usize| exchange(data[3], DType::U8, ranks, index, |_, _| len);
        let calls: [&dyn Fn(usize) -> MemberCall; 5] = [&scatter, &gather, &reduce, &swap, &gather];
        let started = suite.start_all(&**world, &calls)?;
        let after = start_each(suite, &**world)?;
        suite.wait_reversed(after)?;
        suite.wait_reversed(started)?;
        suite.wait_reversed(before)?;
    }
    Ok(())
}

/// The time for which the late rank sleeps before it calls the barrier.
const LATE: Duration = Duration::from_millis(20);

/// Checks that no rank leaves a barrier before the late rank calls it. Each rank is late once.
///
/// Before it sleeps, the late rank waits for a message from every other rank. Each of the other ranks sends this
/// message immediately before it calls the barrier. Each of them measures the time from sending the message to the end
/// of the barrier. This time must be at least the sleep time, even if a rank is slow.
pub(super) fn barrier(suite: &mut CaseContext<'_>) -> CheckResult {
    let comm = &**suite.world;
    let hello = || Buffer::from(vec![1u8]);
    for late in 0..comm.size() {
        let began = Instant::now();
        if comm.rank() == late {
            for peer in (0..comm.size()).filter(|peer| *peer != late) {
                let heard = suite.receive(comm, peer, hello())?;
                suite.wait(heard)?;
            }
            sleep(LATE);
            suite.barrier(comm)?;
            continue;
        }
        let said = suite.send(comm, late, hello())?;
        suite.wait(said)?;
        suite.barrier(comm)?;
        let passed = if began.elapsed() < LATE {
            "before"
        } else {
            "after"
        };
        let call = format!("barrier over {}", comm.group());
        let text = |when| format!("the barrier ended {when} index {late} joined");
        suite.text(call, text(passed), text("after"))?;
    }
    Ok(())
}

/// Checks that the pool reuses returned memory, and that the old contents of the memory do not change a result.
pub(super) fn pool(suite: &mut CaseContext<'_>) -> CheckResult {
    const ROUNDS: u64 = 20;
    let comm = &**suite.world;
    let Some(pool) = comm.pool() else {
        return Ok(());
    };
    let (ranks, size) = (comm.group().ranks(), comm.size());
    let len = (2 * MIN_POOLED_LEN).next_multiple_of(size);
    let calls = [
        Call::AllReduce(ReduceOp::Sum),
        Call::AllGather,
        Call::ReduceScatter(ReduceOp::Sum),
        Call::Broadcast { root: size - 1 },
    ];
    let before = pool.allocated();
    for _ in 0..ROUNDS {
        for call in &calls {
            let data = suite.data();
            let part = |rank: &usize| (call.clone(), data.whole(DType::F32, *rank, len));
            let parts: Vec<MemberCall> = ranks.iter().map(part).collect();
            let wanted = model::expected(&parts, comm.rank(), suite.options.fixed_order);
            let text = format!("{} from the pool", describe(comm, call, &parts[0].1));
            let mut input = pool.take(DType::F32, len);
            let written = input.write(0, &parts[comm.rank()].1, 0..len);
            written.map_err(|error| suite.wrong(text.clone(), error.to_string()))?;
            let found = comm.start(call.clone(), input).and_then(Pending::wait);
            let found = found.map_err(|error| suite.failed(text.clone(), error))?;
            suite.compare(text, &wanted, &found)?;
            pool.give(found);
        }
    }
    // Without reuse there would be two allocations per call, one for the input and one for the result.
    let made = pool.allocated() - before;
    let most = ROUNDS * calls.len() as u64 / 2;
    let fits = if made <= most {
        "no more than"
    } else {
        "more than"
    };
    let text = |fits| format!("{fits} {most} allocations, half the number of calls");
    let call = format!("the pool of the calls over {}", comm.group());
    suite.text(call, text(fits), text("no more than"))
}
