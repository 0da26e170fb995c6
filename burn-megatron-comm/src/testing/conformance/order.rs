//! Calls in flight: any order of waits, handles that are dropped, calls started as one; and what holds
//! ranks back.

use std::thread::sleep;
use std::time::{Duration, Instant};

use super::ConformanceError;
use super::model::{self, Part};
use super::operations::exchange;
use super::suite::{Checked, Flight, Suite, describe};
use crate::buffer::{Buffer, DType};
use crate::call::{Call, ReduceOp};
use crate::communicator::Communicator;
use crate::pending::Pending;
use crate::pool::LEAST_POOLED;

/// Starts one of each collective, with fresh numbers.
fn start_each(
    suite: &mut Suite<'_>,
    comm: &dyn Communicator,
) -> Result<Vec<Flight>, ConformanceError> {
    let ranks = comm.group().ranks();
    let size = ranks.len();
    let calls = [
        Call::AllReduce(ReduceOp::Sum),
        Call::AllGather,
        Call::ReduceScatter(ReduceOp::Max),
        Call::Broadcast { root: size - 1 },
    ];
    let mut flights = Vec::new();
    for call in calls {
        let data = suite.data();
        let input = |index: usize| data.whole(DType::F32, ranks[index], 3 * size);
        flights.push(suite.start(comm, |index| (call.clone(), input(index)))?);
    }
    let data = suite.data();
    let count = |from: usize, to: usize| (from + 2 * to) % 4;
    flights.push(suite.start(comm, |index| {
        exchange(data, DType::I64, ranks, index, count)
    })?);
    let barrier = |_| (Call::Barrier, Buffer::empty(DType::U8));
    flights.push(suite.start(comm, barrier)?);
    Ok(flights)
}

/// Each rank waits in an order of its own.
pub(super) fn any_order(suite: &mut Suite<'_>) -> Checked {
    let world = suite.world;
    for turn in 0..3 {
        let mut flights = start_each(suite, &**world)?;
        flights.extend(start_each(suite, &**world)?);
        let len = flights.len();
        flights.rotate_left((turn + 5 * world.rank()) % len);
        match (world.rank() + turn) % 2 {
            0 => suite.land_reversed(flights)?,
            _ => flights.into_iter().try_for_each(|one| suite.land(one))?,
        }
    }
    Ok(())
}

/// A rank that drops a handle has given its part: the others get theirs, and later calls are in order.
pub(super) fn dropped(suite: &mut Suite<'_>) -> Checked {
    let world = suite.world;
    for turn in 0..world.size() {
        let flights = start_each(suite, &**world)?;
        for (number, flight) in flights.into_iter().enumerate() {
            match (number + turn) % world.size() == world.rank() {
                true => drop(flight),
                false => suite.land(flight)?,
            }
        }
        suite.meet(&**world)?;
    }
    let last = start_each(suite, &**world)?;
    suite.land_reversed(last)
}

/// Several collectives that are started as one, among others that are not.
pub(super) fn started_as_one(suite: &mut Suite<'_>) -> Checked {
    let world = suite.world;
    let (ranks, size) = (world.group().ranks(), world.size());
    let empty = suite.start_all(&**world, &[])?;
    suite.land_reversed(empty)?;
    for len in [0, 1, 2000] {
        let before = start_each(suite, &**world)?;
        let data = [suite.data(), suite.data(), suite.data(), suite.data()];
        let scatter = |index: usize| -> Part {
            let input = data[0].whole(DType::F32, ranks[index], size * len);
            (Call::ReduceScatter(ReduceOp::Sum), input)
        };
        let gather = |index: usize| -> Part {
            let input = data[1].whole(DType::BF16, ranks[index], len);
            (Call::AllGather, input)
        };
        let reduce = |index: usize| -> Part {
            let input = data[2].whole(DType::I64, ranks[index], len);
            (Call::AllReduce(ReduceOp::Max), input)
        };
        let swap = |index: usize| exchange(data[3], DType::U8, ranks, index, |_, _| len);
        let calls: [&dyn Fn(usize) -> Part; 5] = [&scatter, &gather, &reduce, &swap, &gather];
        let flights = suite.start_all(&**world, &calls)?;
        let after = start_each(suite, &**world)?;
        suite.land_reversed(after)?;
        suite.land_reversed(flights)?;
        suite.land_reversed(before)?;
    }
    Ok(())
}

/// How late the last rank comes to a barrier.
const LATE: Duration = Duration::from_millis(20);

/// Each rank in turn comes late: it begins to pause when it has heard from each of the others that it
/// is about to come. So none of them can be through the barrier before the pause is over, by its own
/// clock since that message, however slow any of them is.
pub(super) fn barrier(suite: &mut Suite<'_>) -> Checked {
    let comm = &**suite.world;
    let hello = || Buffer::from(vec![1u8]);
    for late in 0..comm.size() {
        let began = Instant::now();
        if comm.rank() == late {
            for peer in (0..comm.size()).filter(|peer| *peer != late) {
                let heard = suite.receive(comm, peer, hello())?;
                suite.land(heard)?;
            }
            sleep(LATE);
            suite.meet(comm)?;
            continue;
        }
        let said = suite.send(comm, late, hello())?;
        suite.land(said)?;
        suite.meet(comm)?;
        let passed = if began.elapsed() < LATE {
            "before"
        } else {
            "after"
        };
        let call = format!("barrier over {}", comm.group());
        let text = |when| format!("through {when} the index {late} came");
        suite.text(call, text(passed), text("after"))?;
    }
    Ok(())
}

/// Memory that is given back is used again, and holds nothing of what it held.
pub(super) fn pool(suite: &mut Suite<'_>) -> Checked {
    const ROUNDS: u64 = 20;
    let comm = &**suite.world;
    let Some(pool) = comm.pool() else {
        return Ok(());
    };
    let (ranks, size) = (comm.group().ranks(), comm.size());
    let len = (2 * LEAST_POOLED).next_multiple_of(size);
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
            let parts: Vec<Part> = ranks.iter().map(part).collect();
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
    // Without reuse there were two for each call, the input and the result.
    let made = pool.allocated() - before;
    let most = ROUNDS * calls.len() as u64 / 2;
    let fits = if made <= most {
        "no more than"
    } else {
        "more than"
    };
    let text = |fits| format!("{fits} {most} allocations in twice as many calls");
    let call = format!("the pool of the calls over {}", comm.group());
    suite.text(call, text(fits), text("no more than"))
}
