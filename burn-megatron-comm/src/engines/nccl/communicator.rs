//! NCCL communicators, from their initialization to their destruction.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use parking_lot::Mutex;

use super::driver::{Priority, Stream};
use super::library::{Comm, Library, Progress};
use super::registered::{RegisteredAllocations, RegisteredWindow};
use crate::process::ResultSlot;
use burn_megatron_rendezvous::GroupId;

/// The key of a communicator. Members are given by their indices in the group. All ranks sort the keys in the same
/// order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum CommKey {
    Group(GroupId),
    Message {
        group: GroupId,
        from: usize,
        to: usize,
    },
}

/// A queue of calls that must stay in order: the collectives of one stream, or the messages in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum CallQueue {
    Collectives(Priority),
    Messages(CommKey),
}

impl CommKey {
    /// Returns the key under which the unique id is posted in the key-value store.
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

/// A communicator and the stream on which its calls run.
#[derive(Debug)]
pub(super) struct NcclCommunicator {
    pub state: CommState,
    pub stream: Stream,
    pub windows: Vec<RegisteredWindow>,
    pub allocations: RegisteredAllocations,
    /// A slot that is set when the communicator is ready or has failed.
    pub ready: Option<Arc<ResultSlot>>,
}

#[derive(Debug)]
pub(super) enum CommState {
    /// Another thread [creates](super::opening) the communicator.
    Opening,
    /// NCCL is splitting the communicator from its parent and writes it to the slot.
    Splitting {
        parent: Comm,
        slot: Box<AtomicPtr<c_void>>,
    },
    /// NCCL waits for the other ranks of the split.
    Initializing(Comm),
    Ready(Comm),
    Failed(String),
}

impl NcclCommunicator {
    pub fn new(state: CommState, stream: Stream, ready: Option<Arc<ResultSlot>>) -> Self {
        Self {
            state,
            stream,
            windows: vec![],
            allocations: RegisteredAllocations::default(),
            ready,
        }
    }

    pub fn comm(&self) -> Option<Comm> {
        match self.state {
            CommState::Ready(comm) => Some(comm),
            _ => None,
        }
    }

    /// Returns whether NCCL is splitting the communicator from its parent.
    pub fn is_splitting(&self) -> bool {
        matches!(
            self.state,
            CommState::Splitting { .. } | CommState::Initializing(_)
        )
    }

    /// Advances the state as far as possible without waiting. Adds new communicators to `comms`.
    pub fn advance(&mut self, library: &Library, comms: &LiveComms) {
        let next = match &self.state {
            CommState::Opening | CommState::Ready(_) | CommState::Failed(_) => return,
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

/// The list of live communicators. Any thread may abort them. Each communicator is aborted at most once.
#[derive(Debug, Default)]
pub(super) struct LiveComms {
    alive: Mutex<Vec<Comm>>,
    pub aborted: AtomicBool,
}

impl LiveComms {
    pub fn add(&self, comm: Comm) {
        self.alive.lock().push(comm);
    }

    /// Adds the communicators that `init` returns, unless all communicators have been aborted.
    ///
    /// # Errors
    /// The errors of `init`, or an error if all communicators have been aborted.
    pub fn add_all(
        &self,
        init: impl FnOnce() -> Result<Vec<Comm>, String>,
        library: &Library,
    ) -> Result<Vec<Comm>, String> {
        self.check_not_aborted()?;
        let comms = init()?;
        let mut alive = self.alive.lock();
        // An aborting thread sets the flag before it takes the live communicators.
        if let Err(reason) = self.check_not_aborted() {
            drop(alive);
            abort(comms, library);
            return Err(reason);
        }
        alive.extend(&comms);
        Ok(comms)
    }

    /// Calls `f` with the guarantee that no thread aborts the communicator during the call.
    ///
    /// # Errors
    /// The errors of `f`, or an error if the communicator has been aborted.
    pub fn with<T>(&self, comm: Comm, f: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
        let alive = self.alive.lock();
        if alive.contains(&comm) {
            f()
        } else {
            Err(ABORTED.into())
        }
    }

    fn check_not_aborted(&self) -> Result<(), String> {
        if self.aborted.load(Ordering::Acquire) {
            Err(ABORTED.into())
        } else {
            Ok(())
        }
    }

    /// Removes a communicator from the list. Returns whether it was alive.
    pub fn remove(&self, comm: Comm) -> bool {
        let mut alive = self.alive.lock();
        let before = alive.len();
        alive.retain(|other| *other != comm);
        alive.len() < before
    }

    pub fn is_empty(&self) -> bool {
        self.alive.lock().is_empty()
    }

    /// Aborts all communicators except the communicators in `kept`. Errors of the library are logged and ignored.
    pub fn abort_all_but(&self, kept: &[Comm], library: &Library) {
        let mut alive = self.alive.lock();
        let (kept, others): (Vec<_>, Vec<_>) =
            alive.drain(..).partition(|comm| kept.contains(comm));
        *alive = kept;
        drop(alive);
        abort(others, library);
    }

    /// Aborts all communicators. Errors of the library are logged and ignored.
    pub fn abort_all(&self, library: &Library) {
        self.abort_all_but(&[], library);
    }
}

const ABORTED: &str = "it was aborted";

fn abort(comms: Vec<Comm>, library: &Library) {
    for comm in comms {
        if let Err(reason) = library.abort(comm) {
            tracing::warn!("nccl: {reason}");
        }
    }
}
