//! The calls of an NCCL group and their execution.

use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use super::super::fake_device::{DelayedTasks, FakeStream, read, write};
use super::{FakeComm, FakeWorld, INVALID_ARGUMENT, INVALID_USAGE};
use crate::buffer::{Buffer, DType};
use crate::call::ReduceOp;
use crate::engines::nccl::api::{IN_PROGRESS, RawComm, RawStream, SUCCESS};
use crate::engines::nccl::buffers::{bytes, bytes_mut};
use crate::engines::nccl::types::{NcclType, reduction};
use crate::engines::reduce::reduce_into;

/// The delay until a launch reaches its stream.
static LAUNCHES: LazyLock<DelayedTasks> =
    LazyLock::new(|| DelayedTasks::new(Duration::from_micros(300)));

/// One call in an NCCL group.
#[derive(Clone, Copy)]
enum Op {
    AllReduce(ReduceOp),
    AllGather,
    ReduceScatter(ReduceOp),
    Broadcast(usize),
    Send(usize),
    Receive(usize),
}

impl Op {
    fn name(self) -> &'static str {
        match self {
            Self::AllReduce(_) => "all_reduce",
            Self::AllGather => "all_gather",
            Self::ReduceScatter(_) => "reduce_scatter",
            Self::Broadcast(_) => "broadcast",
            Self::Send(_) => "send",
            Self::Receive(_) => "receive",
        }
    }
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

/// A launch, which consists of the world, the rank in this world, and the calls with their counts.
type Launch = (usize, usize, Vec<(&'static str, usize)>);

/// The launches of this test, in order.
static LOG: Mutex<Vec<Launch>> = Mutex::new(vec![]);

/// Clears the launches of earlier tests.
pub fn forget() {
    LOG.lock().unwrap().clear();
}

/// Returns the calls of each launch of a rank, in order.
pub fn launches(world: &Arc<FakeWorld>, rank: usize) -> Vec<Vec<(&'static str, usize)>> {
    let log = LOG.lock().unwrap();
    let of_rank = log
        .iter()
        .filter(|(of, by, _)| (*of, *by) == (Arc::as_ptr(world) as usize, rank));
    of_rank.map(|(.., calls)| calls.clone()).collect()
}

/// Returns whether this thread has started a group.
pub fn in_group() -> bool {
    GROUP.with_borrow(Option::is_some)
}

thread_local! {
    static GROUP: RefCell<Option<Vec<Entry>>> = const { RefCell::new(None) };
    /// The communicators of the last group of this thread.
    static LAUNCHED: RefCell<Vec<&'static FakeComm>> = const { RefCell::new(vec![]) };
}

/// Whether one thread may have several groups in progress.
pub static CONCURRENT_GROUPS: AtomicBool = AtomicBool::new(true);

fn dtype(number: c_int) -> DType {
    let found = NcclType::ALL.into_iter();
    match found.rev().find(|wire| wire.number() == number) {
        Some(NcclType::Plain(dtype)) => dtype,
        other => panic!("no buffer is of {other:?}"),
    }
}

fn reduce_op(number: c_int) -> ReduceOp {
    let mut all = ReduceOp::ALL.into_iter();
    all.find(|op| reduction(*op) == number).unwrap()
}

/// Checks that the input and the output do not overlap, unless the call is in place. Both lengths are given as numbers
/// of parts.
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
    let is_launching = |comm: &&FakeComm| comm.busy.load(Ordering::SeqCst) > 0;
    if !CONCURRENT_GROUPS.load(Ordering::SeqCst) && LAUNCHED.take().iter().any(is_launching) {
        return INVALID_USAGE;
    }
    GROUP.with_borrow_mut(|group| match group.replace(vec![]) {
        None => SUCCESS,
        Some(_) => INVALID_USAGE,
    })
}

/// Enqueues the calls of the group on their streams after a delay.
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
        let comm = launch[0].comm;
        comm.busy.fetch_add(1, Ordering::SeqCst);
        let calls = launch.iter().map(|entry| (entry.op.name(), entry.count));
        let of = Arc::as_ptr(&comm.world) as usize;
        LOG.lock().unwrap().push((of, comm.rank, calls.collect()));
    }
    LAUNCHED.set(launches.iter().map(|launch| launch[0].comm).collect());
    LAUNCHES.put(move || {
        for launch in launches {
            let comm = launch[0].comm;
            let sync_points = launch.iter().filter(|entry| entry.is_collective()).count();
            let first = comm.next.fetch_add(sync_points, Ordering::SeqCst);
            // In a world of more than two ranks, some ranks may have no message in the group.
            let is_message = comm.world.size == 2
                && launch.iter().any(|it| match it.op {
                    Op::Send(peer) | Op::Receive(peer) => peer != comm.rank,
                    _ => false,
                });
            let launched = move || {
                FakeStream::of(launch[0].stream).put(move || perform(&launch, first));
                comm.busy.fetch_sub(1, Ordering::SeqCst);
            };
            if is_message {
                comm.world.connect(comm.rank, launched);
            } else {
                launched();
            }
        }
    });
    IN_PROGRESS
}

/// Executes the calls of a launch. Sends are posted first, and their completion is awaited at the end.
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
        number += usize::from(entry.is_collective());
    }
    for entry in launch {
        if let Op::Send(to) = entry.op {
            entry.comm.world.wait_until_received(entry.comm.rank, to);
        }
    }
}

impl Entry {
    /// Returns whether all ranks take part in the call. The number of messages may differ between ranks.
    fn is_collective(&self) -> bool {
        !matches!(self.op, Op::Send(_) | Op::Receive(_))
    }

    fn input(&self) -> Vec<u8> {
        let scale = match self.op {
            Op::ReduceScatter(_) => self.comm.world.size,
            _ => 1,
        };
        let bytes = self.count * self.dtype.size_of() * scale;
        // SAFETY: the engine passes a pointer to this number of bytes.
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
            Op::AllReduce(op) => self.reduced(&world.all_exchange(number, rank, self.input())?, op),
            Op::ReduceScatter(op) => {
                let whole = self.reduced(&world.all_exchange(number, rank, self.input())?, op);
                let part = whole.len() / world.size;
                whole[rank * part..(rank + 1) * part].to_vec()
            }
            Op::AllGather => {
                let all = world.all_exchange(number, rank, self.input())?;
                all.iter().flat_map(|bytes| bytes.to_vec()).collect()
            }
            Op::Broadcast(root) => world.all_exchange(number, rank, self.input())?[root].to_vec(),
        };
        // SAFETY: the engine passes a pointer to this number of bytes.
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
