//! Calls of a group, and how they are carried out.

use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::sync::atomic::Ordering;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use super::super::fake_device::{FakeStream, Later, read, write};
use super::{FakeComm, INVALID_ARGUMENT, INVALID_USAGE};
use crate::buffer::{Buffer, DType};
use crate::call::ReduceOp;
use crate::nccl::api::{IN_PROGRESS, RawComm, RawStream, SUCCESS};
use crate::nccl::memory::{bytes, bytes_mut};
use crate::nccl::types::{Wire, reduction};
use crate::reduce::reduce_into;

/// How late a launch reaches its stream.
static LAUNCHES: LazyLock<Later> = LazyLock::new(|| Later::new(Duration::from_micros(300)));

/// One call of a group.
#[derive(Clone, Copy)]
enum Op {
    AllReduce(ReduceOp),
    AllGather,
    ReduceScatter(ReduceOp),
    Broadcast(usize),
    Send(usize),
    Receive(usize),
}

#[derive(Clone, Copy)]
struct Entry {
    op: Op,
    from: u64,
    to: u64,
    count: usize,
    dtype: DType,
    comm: &'static FakeComm,
    stream: usize,
}

thread_local! {
    static GROUP: RefCell<Option<Vec<Entry>>> = const { RefCell::new(None) };
}

fn dtype(number: c_int) -> DType {
    let found = Wire::ALL.into_iter();
    match found.rev().find(|wire| wire.number() == number) {
        Some(Wire::Plain(dtype)) => dtype,
        other => panic!("no buffer is of {other:?}"),
    }
}

fn reduce_op(number: c_int) -> ReduceOp {
    let all = [
        ReduceOp::Sum,
        ReduceOp::Average,
        ReduceOp::Max,
        ReduceOp::Min,
    ];
    all.into_iter().find(|op| reduction(*op) == number).unwrap()
}

/// Input and output must not overlap, unless the rank's part lies where it belongs. Both are given in
/// parts.
fn apart_or_in_place(from: u64, to: u64, part: usize, rank: usize, parts: [usize; 2]) -> bool {
    let [input, output] = parts.map(|parts| (parts * part) as u64);
    let own = (rank * part) as u64;
    let in_place = match parts {
        [1, 1] => from == to,
        [1, _] => from == to + own,
        _ => to == from + own,
    };
    in_place || to == 0 || from + input <= to || to + output <= from
}

#[allow(clippy::too_many_arguments)]
fn add(
    op: Op,
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    number: c_int,
    comm: RawComm,
    stream: RawStream,
) -> c_int {
    let comm = FakeComm::of(comm);
    if !comm.usable() {
        return INVALID_USAGE;
    }
    let (input, output) = match op {
        Op::AllGather => (1, comm.world.size),
        Op::ReduceScatter(_) => (comm.world.size, 1),
        _ => (1, 1),
    };
    let part = count * dtype(number).size_of();
    if !apart_or_in_place(from as u64, to as u64, part, comm.rank, [input, output]) {
        return INVALID_ARGUMENT;
    }
    GROUP.with_borrow_mut(|group| match group {
        None => INVALID_USAGE,
        Some(group) => {
            group.push(Entry {
                op,
                from: from as u64,
                to: to as u64,
                count,
                dtype: dtype(number),
                comm,
                stream: stream as usize,
            });
            SUCCESS
        }
    })
}

pub extern "C" fn all_reduce(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    dtype: c_int,
    op: c_int,
    comm: RawComm,
    stream: RawStream,
) -> c_int {
    add(
        Op::AllReduce(reduce_op(op)),
        from,
        to,
        count,
        dtype,
        comm,
        stream,
    )
}

pub extern "C" fn reduce_scatter(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    dtype: c_int,
    op: c_int,
    comm: RawComm,
    stream: RawStream,
) -> c_int {
    let op = Op::ReduceScatter(reduce_op(op));
    add(op, from, to, count, dtype, comm, stream)
}

pub extern "C" fn all_gather(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    dtype: c_int,
    comm: RawComm,
    stream: RawStream,
) -> c_int {
    add(Op::AllGather, from, to, count, dtype, comm, stream)
}

pub extern "C" fn broadcast(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    dtype: c_int,
    root: c_int,
    comm: RawComm,
    stream: RawStream,
) -> c_int {
    let op = Op::Broadcast(root as usize);
    add(op, from, to, count, dtype, comm, stream)
}

pub extern "C" fn send(
    from: *const c_void,
    count: usize,
    dtype: c_int,
    peer: c_int,
    comm: RawComm,
    stream: RawStream,
) -> c_int {
    let (op, to) = (Op::Send(peer as usize), std::ptr::null_mut());
    add(op, from, to, count, dtype, comm, stream)
}

pub extern "C" fn receive(
    to: *mut c_void,
    count: usize,
    dtype: c_int,
    peer: c_int,
    comm: RawComm,
    stream: RawStream,
) -> c_int {
    let (op, from) = (Op::Receive(peer as usize), std::ptr::null());
    add(op, from, to, count, dtype, comm, stream)
}

pub extern "C" fn group_start() -> c_int {
    GROUP.with_borrow_mut(|group| match group.replace(vec![]) {
        None => SUCCESS,
        Some(_) => INVALID_USAGE,
    })
}

/// Puts what was grouped on its streams, a while later.
pub extern "C" fn group_end() -> c_int {
    let Some(group) = GROUP.take() else {
        return INVALID_USAGE;
    };
    let mut launches: Vec<Vec<Entry>> = vec![];
    for entry in group {
        let same = |launch: &&mut Vec<Entry>| std::ptr::eq(launch[0].comm, entry.comm);
        match launches.iter_mut().find(same) {
            Some(launch) => launch.push(entry),
            None => launches.push(vec![entry]),
        }
    }
    for launch in &launches {
        launch[0].comm.busy.fetch_add(1, Ordering::SeqCst);
    }
    LAUNCHES.put(move || {
        for launch in launches {
            let comm = launch[0].comm;
            let meetings = launch.iter().filter(|entry| entry.meets()).count();
            let first = comm.next.fetch_add(meetings, Ordering::SeqCst);
            FakeStream::of(launch[0].stream).put(move || perform(&launch, first));
            comm.busy.fetch_sub(1, Ordering::SeqCst);
        }
    });
    IN_PROGRESS
}

/// Sends go ahead of everything, and are waited for at the end.
fn perform(launch: &[Entry], mut number: usize) {
    for entry in launch {
        if let Op::Send(to) = entry.op {
            entry.comm.world.post(entry.comm.rank, to, entry.input());
        }
    }
    for entry in launch {
        if entry.perform(number).is_none() {
            return;
        }
        number += usize::from(entry.meets());
    }
    for entry in launch {
        if let Op::Send(to) = entry.op {
            entry.comm.world.await_taken(entry.comm.rank, to);
        }
    }
}

impl Entry {
    /// Whether all ranks meet for it; a rank may have more messages than another.
    fn meets(&self) -> bool {
        !matches!(self.op, Op::Send(_) | Op::Receive(_))
    }

    fn input(&self) -> Vec<u8> {
        let scale = match self.op {
            Op::ReduceScatter(_) => self.comm.world.size,
            _ => 1,
        };
        let bytes = self.count * self.dtype.size_of() * scale;
        // SAFETY: the engine says that so many are there.
        unsafe { read(self.from, bytes) }.to_vec()
    }

    fn perform(&self, number: usize) -> Option<()> {
        let (world, rank) = (&self.comm.world, self.comm.rank);
        let result = match self.op {
            Op::Send(_) => return Some(()),
            Op::Receive(from) => {
                let message = world.collect(from, rank)?;
                assert_eq!(message.len(), self.count * self.dtype.size_of());
                message
            }
            Op::AllReduce(op) => self.reduced(&world.meet(number, rank, self.input())?, op),
            Op::ReduceScatter(op) => {
                let whole = self.reduced(&world.meet(number, rank, self.input())?, op);
                let part = whole.len() / world.size;
                whole[rank * part..(rank + 1) * part].to_vec()
            }
            Op::AllGather => {
                let all = world.meet(number, rank, self.input())?;
                all.iter().flat_map(|bytes| bytes.to_vec()).collect()
            }
            Op::Broadcast(root) => world.meet(number, rank, self.input())?[root].to_vec(),
        };
        // SAFETY: the engine says that so many may be written.
        unsafe { write(self.to, &result) };
        Some(())
    }

    fn reduced(&self, all: &[Arc<Vec<u8>>], op: ReduceOp) -> Vec<u8> {
        let typed = |raw: &Arc<Vec<u8>>| {
            let mut buffer = Buffer::zeros(self.dtype, raw.len() / self.dtype.size_of());
            bytes_mut(&mut buffer).copy_from_slice(raw);
            buffer
        };
        let mut first = typed(&all[0]);
        let rest: Vec<Buffer> = all[1..].iter().map(typed).collect();
        reduce_into(&mut first, &rest.iter().collect::<Vec<_>>(), op);
        bytes(&first).to_vec()
    }
}
