//! Tests of point-to-point messages.

use std::ops::Range;

use super::ConformanceError;
use super::operations::sweep;
use super::suite::{CaseContext, CheckResult, StartedCall};
use super::values::TestData;
use burn_megatron_comm::{Buffer, Call, Communicator, DType, ReduceOp};

/// Returns message number `number` from the member with index `from` to the member with index `to`. Each message has a
/// different length.
fn message(data: TestData, from: usize, to: usize, number: usize) -> Buffer {
    let seed = data
        .seed
        .wrapping_add(1 + ((to as u64) << 20) + number as u64);
    let data = TestData { seed, ..data };
    data.whole(DType::I32, from, (3 * number + from) % 7)
}

fn send_messages(
    suite: &mut CaseContext<'_>,
    comm: &dyn Communicator,
    data: TestData,
    numbers: Range<usize>,
) -> Result<Vec<StartedCall>, ConformanceError> {
    let (own, peers) = (comm.rank(), suite.peers(comm));
    let all = numbers.flat_map(|number| peers.iter().map(move |peer| (*peer, number)));
    all.map(|(peer, number)| suite.send(comm, peer, message(data, own, peer, number)))
        .collect()
}

fn receive_messages(
    suite: &mut CaseContext<'_>,
    comm: &dyn Communicator,
    data: TestData,
    numbers: Range<usize>,
) -> Result<Vec<StartedCall>, ConformanceError> {
    let (own, peers) = (comm.rank(), suite.peers(comm));
    let all = numbers.flat_map(|number| peers.iter().map(move |peer| (*peer, number)));
    all.map(|(peer, number)| suite.receive(comm, peer, message(data, peer, own, number)))
        .collect()
}

/// Sends messages of every type and length from each rank to the next rank.
pub(super) fn ring(suite: &mut CaseContext<'_>) -> CheckResult {
    sweep(suite, pass_on)
}

/// Sends a message to the next rank and receives a message from the previous rank.
pub(super) fn pass_on(suite: &mut CaseContext<'_>, dtype: DType, len: usize) -> CheckResult {
    let comm = &**suite.world;
    let (own, size) = (comm.rank(), comm.size());
    if size == 1 && !suite.options.self_messages {
        return Ok(());
    }
    let (next, previous) = ((own + 1) % size, (own + size - 1) % size);
    let data = suite.data();
    let sent = suite.send(comm, next, data.whole(dtype, own, len))?;
    let received = suite.receive(comm, previous, data.whole(dtype, previous, len))?;
    suite.wait(received)?;
    suite.wait(sent)
}

/// Starts many messages between every pair of ranks, in both directions, and waits for them in reverse order.
pub(super) fn in_order(suite: &mut CaseContext<'_>) -> CheckResult {
    let (comm, data) = (&**suite.world, suite.data());
    let sent = send_messages(suite, comm, data, 0..20)?;
    let received = receive_messages(suite, comm, data, 0..20)?;
    suite.wait_reversed(received)?;
    suite.wait_reversed(sent)?;
    // Sends messages one after the other, and waits for each message.
    for number in 20..25 {
        let sent = send_messages(suite, comm, data, number..number + 1)?;
        for received in receive_messages(suite, comm, data, number..number + 1)? {
            suite.wait(received)?;
        }
        suite.wait_reversed(sent)?;
    }
    Ok(())
}

/// Starts the receives before any rank sends.
pub(super) fn receives_first(suite: &mut CaseContext<'_>) -> CheckResult {
    let (comm, data) = (&**suite.world, suite.data());
    let received = receive_messages(suite, comm, data, 0..4)?;
    suite.barrier(comm)?;
    let sent = send_messages(suite, comm, data, 0..4)?;
    suite.wait_reversed(received)?;
    suite.wait_reversed(sent)
}

/// Checks that a dropped handle discards only its own message. Tests dropped sends, and receives that are dropped
/// before and after the message is sent.
pub(super) fn dropped(suite: &mut CaseContext<'_>) -> CheckResult {
    let (comm, data) = (&**suite.world, suite.data());
    for (first, receives_first) in [(0, true), (6, false)] {
        let numbers = first..first + 6;
        let mut received = Vec::new();
        if receives_first {
            received = receive_some(suite, comm, data, numbers.clone())?;
        }
        suite.barrier(comm)?;
        drop(send_messages(suite, comm, data, numbers.clone())?);
        suite.barrier(comm)?;
        if !receives_first {
            received = receive_some(suite, comm, data, numbers)?;
        }
        suite.wait_reversed(received)?;
    }
    Ok(())
}

/// Starts a receive for each message and drops the handle of every second receive.
fn receive_some(
    suite: &mut CaseContext<'_>,
    comm: &dyn Communicator,
    data: TestData,
    numbers: Range<usize>,
) -> Result<Vec<StartedCall>, ConformanceError> {
    let mut kept = Vec::new();
    for number in numbers {
        let received = receive_messages(suite, comm, data, number..number + 1)?;
        match number % 2 {
            0 => drop(received),
            _ => kept.extend(received),
        }
    }
    Ok(kept)
}

/// Checks that messages of two groups with the same ranks are not mixed up with each other or with collectives.
pub(super) fn of_groups(suite: &mut CaseContext<'_>) -> CheckResult {
    let world = suite.world;
    let backwards: Vec<usize> = world.group().ranks().iter().rev().copied().collect();
    let other = suite.split(&**world, "backwards", &[backwards])?;
    let (first, second, sums) = (suite.data(), suite.data(), suite.data());
    let mut sent = send_messages(suite, &**world, first, 0..3)?;
    let ranks = world.group().ranks();
    let sum = suite.start(&**world, |index| {
        let input = sums.whole(DType::I64, ranks[index], 5);
        (Call::AllReduce(ReduceOp::Sum), input)
    })?;
    sent.extend(send_messages(suite, &*other, second, 0..3)?);
    let of_other = receive_messages(suite, &*other, second, 0..3)?;
    let of_world = receive_messages(suite, &**world, first, 0..3)?;
    suite.wait_reversed(of_world)?;
    suite.wait(sum)?;
    suite.wait_reversed(of_other)?;
    suite.wait_reversed(sent)
}
