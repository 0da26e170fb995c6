//! Call groups: the calls of a thread between `ncclGroupStart` and `ncclGroupEnd`.

use std::cell::RefCell;
use std::sync::Arc;

use cudarc::driver::sys::{CUresult, CUstream};

use super::operation::Call;
use super::state::{state, wait};
use super::{Code, Failure, IN_PROGRESS, SUCCESS, UNHANDLED_CUDA_ERROR, usage};
use crate::driver::jobs;

/// A call on a stream of a communicator.
struct Entry {
    comm: usize,
    stream: CUstream,
    call: Call,
}

#[derive(Default)]
struct Group {
    depth: usize,
    entries: Vec<Entry>,
    /// Communicators on which an operation was begun.
    begun: Vec<usize>,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

pub(super) fn start() {
    GROUP.with_borrow_mut(|group| group.depth += 1);
}

/// Ends a group.
///
/// # Errors
/// Returns an error if no group was started, or the first error of its calls.
pub(super) fn end() -> Result<Code, Failure> {
    let depth = GROUP.with_borrow(|group| group.depth);
    match depth {
        0 => Err(usage("ncclGroupEnd without ncclGroupStart")),
        1 => carry_out(GROUP.take()),
        _ => {
            GROUP.with_borrow_mut(|group| group.depth -= 1);
            Ok(SUCCESS)
        }
    }
}

/// Executes a call now, or at the end of the open group.
pub(super) fn call(comm: usize, stream: CUstream, call: Call) -> Result<Code, Failure> {
    {
        let state = state();
        let found = state.usable(comm)?;
        let (rank, world) = (found.rank, found.world);
        let size = state.worlds.get(&world).map_or(0, |world| world.size);
        call.check(rank, size)?;
    }
    let entry = Entry { comm, stream, call };
    add(|group| group.entries.push(entry))
}

/// Waits for the operation on a communicator if it is blocking, now or at the end of the group.
pub(super) fn begun(comm: usize) -> Result<Code, Failure> {
    add(|group| group.begun.push(comm))
}

fn add(what: impl FnOnce(&mut Group)) -> Result<Code, Failure> {
    let open = GROUP.with_borrow_mut(|group| {
        what(group);
        group.depth > 0
    });
    if open {
        Ok(SUCCESS)
    } else {
        carry_out(GROUP.take())
    }
}

fn carry_out(group: Group) -> Result<Code, Failure> {
    let Group { entries, begun, .. } = group;
    let mut comms = begun.clone();
    for (comm, stream, calls) in by_comm(entries)? {
        let launch = state().launch(comm, stream as usize, &calls)?;
        comms.push(comm);
        let attempt = move |memory: &_| state().attempt(launch, memory);
        match jobs::enqueue_until(stream, Arc::new(attempt)) {
            CUresult::CUDA_SUCCESS => {}
            other => {
                return Err(Failure {
                    code: UNHANDLED_CUDA_ERROR,
                    reason: format!("the stream does not take it: {other:?}"),
                });
            }
        }
    }
    for comm in &begun {
        wait(*comm)?;
    }
    let state = state();
    let blocks = |comm: &usize| {
        state
            .comms
            .get(comm)
            .is_none_or(|comm| comm.settings.blocking)
    };
    if comms.iter().all(blocks) {
        Ok(SUCCESS)
    } else {
        Ok(IN_PROGRESS)
    }
}

/// Returns the calls of each communicator, in order.
fn by_comm(entries: Vec<Entry>) -> Result<Vec<(usize, CUstream, Vec<Call>)>, Failure> {
    let mut launches: Vec<(usize, CUstream, Vec<Call>)> = vec![];
    for Entry { comm, stream, call } in entries {
        match launches.iter_mut().find(|(other, ..)| *other == comm) {
            None => launches.push((comm, stream, vec![call])),
            Some((_, other, calls)) if *other == stream => calls.push(call),
            Some(_) => {
                return Err(usage(
                    "a group calls one communicator on two streams: not emulated",
                ));
            }
        }
    }
    Ok(launches)
}
