//! NCCL communicators from initialization to their end.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use parking_lot::Mutex;

use super::driver::Stream;
use super::library::{Comm, Library, Progress};
use super::registered::RegisteredBuffer;
use crate::process::{GroupId, ResultSlot};

/// Identifies a communicator. Members are indices in the group. All ranks sort the keys alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum CommKey {
    Group(GroupId),
    Message {
        group: GroupId,
        from: usize,
        to: usize,
    },
}

/// The calls that share one order: the collectives of all groups, or the messages of one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum CallQueue {
    Collectives,
    Messages(CommKey),
}

impl CommKey {
    pub fn queue(self) -> CallQueue {
        match self {
            CommKey::Group(_) => CallQueue::Collectives,
            CommKey::Message { .. } => CallQueue::Messages(self),
        }
    }

    /// The key of the unique id in the store.
    pub fn store_key(self) -> String {
        match self {
            CommKey::Group(GroupId::WORLD) => "nccl/world".into(),
            CommKey::Group(GroupId(group)) => format!("nccl/group/{group:016x}"),
            CommKey::Message {
                group: GroupId(group),
                from,
                to,
            } => format!("nccl/message/{group:016x}/{from}-{to}"),
        }
    }
}

/// One communicator and the stream of its calls.
#[derive(Debug)]
pub(super) struct NcclCommunicator {
    pub state: CommState,
    pub stream: Stream,
    pub staging: Vec<RegisteredBuffer>,
    /// Completed when the communicator is ready or has failed.
    pub ready: Option<Arc<ResultSlot>>,
}

#[derive(Debug)]
pub(super) enum CommState {
    /// The unique id is not known yet; this will be the rank `rank` of `size`.
    AwaitingId {
        rank: usize,
        size: usize,
    },
    /// It is split off its parent; NCCL writes it to the slot.
    Splitting {
        parent: Comm,
        slot: Box<AtomicPtr<c_void>>,
    },
    /// NCCL waits for the other ranks.
    Initializing(Comm),
    Ready(Comm),
    Failed(String),
}

impl NcclCommunicator {
    pub fn new(state: CommState, stream: Stream, ready: Option<Arc<ResultSlot>>) -> Self {
        Self {
            state,
            stream,
            staging: vec![],
            ready,
        }
    }

    pub fn comm(&self) -> Option<Comm> {
        match self.state {
            CommState::Ready(comm) => Some(comm),
            _ => None,
        }
    }

    /// Advances as far as possible without waiting; adds new communicators to `comms`.
    pub fn advance(&mut self, library: &Library, comms: &LiveComms) {
        let next = match &self.state {
            CommState::AwaitingId { .. } | CommState::Ready(_) | CommState::Failed(_) => return,
            CommState::Splitting { parent, slot } => match library.poll(*parent) {
                Ok(Progress::Running) => return,
                Ok(Progress::Done) => {
                    let comm = slot.load(Ordering::Acquire);
                    if comm.is_null() {
                        Err("ncclCommSplit returned no communicator".to_string())
                    } else {
                        Ok(CommState::Initializing(Comm(comm)))
                    }
                }
                Err(reason) => Err(reason),
            },
            CommState::Initializing(comm) => match library.poll(*comm) {
                Ok(Progress::Running) => return,
                Ok(Progress::Done) => Ok(CommState::Ready(*comm)),
                Err(reason) => Err(reason),
            },
        };
        if let Ok(CommState::Initializing(comm)) = &next {
            comms.add(*comm);
        }
        self.state = next.unwrap_or_else(CommState::Failed);
    }
}

/// Memory that NCCL writes a communicator to.
pub(super) fn comm_slot() -> Box<AtomicPtr<c_void>> {
    Box::new(AtomicPtr::new(ptr::null_mut()))
}

/// The communicators that any thread may abort, each once.
#[derive(Debug, Default)]
pub(super) struct LiveComms {
    alive: Mutex<Vec<Comm>>,
    pub aborted: AtomicBool,
}

impl LiveComms {
    pub fn add(&self, comm: Comm) {
        self.alive.lock().push(comm);
    }

    /// Removes one; returns whether it was there.
    pub fn remove(&self, comm: Comm) -> bool {
        let mut alive = self.alive.lock();
        let before = alive.len();
        alive.retain(|other| *other != comm);
        alive.len() < before
    }

    pub fn is_empty(&self) -> bool {
        self.alive.lock().is_empty()
    }

    /// Aborts all; errors of the library are logged and ignored.
    pub fn abort_all(&self, library: &Library) {
        let all = std::mem::take(&mut *self.alive.lock());
        for comm in all {
            if let Err(reason) = library.abort(comm) {
                tracing::warn!("nccl: {reason}");
            }
        }
    }
}
