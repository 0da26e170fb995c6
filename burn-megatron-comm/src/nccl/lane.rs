//! The communicators of a rank, from their beginning to their end.

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::driver::Stream;
use super::library::{Comm, Library, Progress};
use super::registered::Staging;
use crate::process::{GroupId, Slot};

/// Which communicator. Members are indices in the group. All ranks sort them alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Key {
    Group(GroupId),
    Message {
        group: GroupId,
        from: usize,
        to: usize,
    },
}

/// What has one order: the collectives of all groups, or the messages of one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Queue {
    Collectives,
    Messages(Key),
}

impl Key {
    pub fn queue(self) -> Queue {
        match self {
            Key::Group(_) => Queue::Collectives,
            Key::Message { .. } => Queue::Messages(self),
        }
    }

    /// What its unique id is posted under.
    pub fn posted_as(self) -> String {
        match self {
            Key::Group(GroupId::WORLD) => "nccl/world".into(),
            Key::Group(GroupId(group)) => format!("nccl/group/{group:016x}"),
            Key::Message {
                group: GroupId(group),
                from,
                to,
            } => format!("nccl/message/{group:016x}/{from}-{to}"),
        }
    }
}

/// One communicator and the stream that it works on.
#[derive(Debug)]
pub(super) struct Lane {
    pub state: State,
    pub stream: Stream,
    pub staging: Vec<Staging>,
    /// Told when it is ready.
    pub told: Option<Arc<Slot>>,
}

#[derive(Debug)]
pub(super) enum State {
    /// The unique id is under way; this will be the rank `rank` of `size`.
    Id {
        rank: usize,
        size: usize,
    },
    /// It is made out of its parent, and appears in the place.
    Split {
        parent: Comm,
        place: Box<AtomicPtr<c_void>>,
    },
    /// The other ranks are waited for.
    Init(Comm),
    Ready(Comm),
    Broken(String),
}

impl Lane {
    pub fn new(state: State, stream: Stream, told: Option<Arc<Slot>>) -> Self {
        Self {
            state,
            stream,
            staging: vec![],
            told,
        }
    }

    pub fn comm(&self) -> Option<Comm> {
        match self.state {
            State::Ready(comm) => Some(comm),
            _ => None,
        }
    }

    /// Goes as far as it can without waiting; `comms` notes what has to be ended one day.
    pub fn advance(&mut self, library: &Library, comms: &Comms) {
        let next = match &self.state {
            State::Id { .. } | State::Ready(_) | State::Broken(_) => return,
            State::Split { parent, place } => match library.poll(*parent) {
                Ok(Progress::Running) => return,
                Ok(Progress::Done) => {
                    let comm = place.load(Ordering::Acquire);
                    match comm.is_null() {
                        true => Err("ncclCommSplit gave no communicator".to_string()),
                        false => Ok(State::Init(Comm(comm))),
                    }
                }
                Err(reason) => Err(reason),
            },
            State::Init(comm) => match library.poll(*comm) {
                Ok(Progress::Running) => return,
                Ok(Progress::Done) => Ok(State::Ready(*comm)),
                Err(reason) => Err(reason),
            },
        };
        if let Ok(State::Init(comm)) = &next {
            comms.add(*comm);
        }
        self.state = next.unwrap_or_else(State::Broken);
    }
}

/// A place for a communicator that is on its way.
pub(super) fn place() -> Box<AtomicPtr<c_void>> {
    Box::new(AtomicPtr::new(ptr::null_mut()))
}

/// The communicators that are alive, so that any thread can abort them, each once.
#[derive(Debug, Default)]
pub(super) struct Comms {
    alive: Mutex<Vec<Comm>>,
    pub given_up: AtomicBool,
}

impl Comms {
    pub fn add(&self, comm: Comm) {
        self.lock().push(comm);
    }

    /// Takes one off, and says whether it was still there.
    pub fn remove(&self, comm: Comm) -> bool {
        let mut alive = self.lock();
        let before = alive.len();
        alive.retain(|other| *other != comm);
        alive.len() < before
    }

    pub fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    /// Aborts all that are there; what the library says to it changes nothing any more.
    pub fn abort_all(&self, library: &Library) {
        let all = std::mem::take(&mut *self.lock());
        for comm in all {
            if let Err(reason) = library.abort(comm) {
                tracing::warn!("nccl: {reason}");
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Comm>> {
        self.alive.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
