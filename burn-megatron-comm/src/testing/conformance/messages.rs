//! Messages from one rank to another.

use std::ops::Range;

use super::ConformanceError;
use super::suite::{Checked, Flight, Suite};
use super::values::Data;
use crate::buffer::{Buffer, DType};
use crate::call::{Call, ReduceOp};
use crate::communicator::Communicator;

/// Message `number` from the member at `from` to the one at `to`; each of another length.
fn letter(data: Data, from: usize, to: usize, number: usize) -> Buffer {
    let seed = data
        .seed
        .wrapping_add(1 + ((to as u64) << 20) + number as u64);
    let data = Data { seed, ..data };
    data.whole(DType::I32, from, (3 * number + from) % 7)
}

fn send_letters(
    suite: &mut Suite<'_>,
    comm: &dyn Communicator,
    data: Data,
    numbers: Range<usize>,
) -> Result<Vec<Flight>, ConformanceError> {
    let (own, peers) = (comm.rank(), suite.peers(comm));
    let all = numbers.flat_map(|number| peers.iter().map(move |peer| (*peer, number)));
    all.map(|(peer, number)| suite.send(comm, peer, letter(data, own, peer, number)))
        .collect()
}

fn receive_letters(
    suite: &mut Suite<'_>,
    comm: &dyn Communicator,
    data: Data,
    numbers: Range<usize>,
) -> Result<Vec<Flight>, ConformanceError> {
    let (own, peers) = (comm.rank(), suite.peers(comm));
    let all = numbers.flat_map(|number| peers.iter().map(move |peer| (*peer, number)));
    all.map(|(peer, number)| suite.receive(comm, peer, letter(data, peer, own, number)))
        .collect()
}

/// Each rank gives to the next one, every type and length.
pub(super) fn ring(suite: &mut Suite<'_>) -> Checked {
    let options = suite.options;
    for dtype in &options.dtypes {
        for len in &options.sizes {
            pass_on(suite, *dtype, *len)?;
        }
    }
    Ok(())
}

/// Each rank gives to the next one and gets from the one before.
pub(super) fn pass_on(suite: &mut Suite<'_>, dtype: DType, len: usize) -> Checked {
    let comm = &**suite.world;
    let (own, size) = (comm.rank(), comm.size());
    if size == 1 && !suite.options.self_messages {
        return Ok(());
    }
    let (next, previous) = ((own + 1) % size, (own + size - 1) % size);
    let data = suite.data();
    let sent = suite.send(comm, next, data.whole(dtype, own, len))?;
    let received = suite.receive(comm, previous, data.whole(dtype, previous, len))?;
    suite.land(received)?;
    suite.land(sent)
}

/// Many messages of every pair in flight, in both directions at once; waited for in reverse.
pub(super) fn in_order(suite: &mut Suite<'_>) -> Checked {
    let (comm, data) = (&**suite.world, suite.data());
    let sent = send_letters(suite, comm, data, 0..20)?;
    let received = receive_letters(suite, comm, data, 0..20)?;
    suite.land_reversed(received)?;
    suite.land_reversed(sent)?;
    // One after the other, each waited for at once.
    for number in 20..25 {
        let sent = send_letters(suite, comm, data, number..number + 1)?;
        for received in receive_letters(suite, comm, data, number..number + 1)? {
            suite.land(received)?;
        }
        suite.land_reversed(sent)?;
    }
    Ok(())
}

/// The receives are posted before any rank sends.
pub(super) fn receives_first(suite: &mut Suite<'_>) -> Checked {
    let (comm, data) = (&**suite.world, suite.data());
    let received = receive_letters(suite, comm, data, 0..4)?;
    suite.meet(comm)?;
    let sent = send_letters(suite, comm, data, 0..4)?;
    suite.land_reversed(received)?;
    suite.land_reversed(sent)
}

/// A handle that is dropped gives up its message, and no other: those of receives before and after the
/// sends, and those of sends.
pub(super) fn dropped(suite: &mut Suite<'_>) -> Checked {
    let (comm, data) = (&**suite.world, suite.data());
    for (first, receives_first) in [(0, true), (6, false)] {
        let numbers = first..first + 6;
        let mut received = Vec::new();
        if receives_first {
            received = receive_some(suite, comm, data, numbers.clone())?;
        }
        suite.meet(comm)?;
        drop(send_letters(suite, comm, data, numbers.clone())?);
        suite.meet(comm)?;
        if !receives_first {
            received = receive_some(suite, comm, data, numbers)?;
        }
        suite.land_reversed(received)?;
    }
    Ok(())
}

/// Starts to receive, and drops the handles of every other number.
fn receive_some(
    suite: &mut Suite<'_>,
    comm: &dyn Communicator,
    data: Data,
    numbers: Range<usize>,
) -> Result<Vec<Flight>, ConformanceError> {
    let mut kept = Vec::new();
    for number in numbers {
        let received = receive_letters(suite, comm, data, number..number + 1)?;
        match number % 2 {
            0 => drop(received),
            _ => kept.extend(received),
        }
    }
    Ok(kept)
}

/// Messages of two groups of the same ranks do not mix, nor with collectives.
pub(super) fn of_groups(suite: &mut Suite<'_>) -> Checked {
    let world = suite.world;
    let backwards: Vec<usize> = world.group().ranks().iter().rev().copied().collect();
    let other = suite.split(&**world, "backwards", &[backwards])?;
    let (first, second, sums) = (suite.data(), suite.data(), suite.data());
    let mut sent = send_letters(suite, &**world, first, 0..3)?;
    let ranks = world.group().ranks();
    let sum = suite.start(&**world, |index| {
        let input = sums.whole(DType::I64, ranks[index], 5);
        (Call::AllReduce(ReduceOp::Sum), input)
    })?;
    sent.extend(send_letters(suite, &*other, second, 0..3)?);
    let of_other = receive_letters(suite, &*other, second, 0..3)?;
    let of_world = receive_letters(suite, &**world, first, 0..3)?;
    suite.land_reversed(of_world)?;
    suite.land(sum)?;
    suite.land_reversed(of_other)?;
    suite.land_reversed(sent)
}
