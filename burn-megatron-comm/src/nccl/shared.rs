//! What the transport and its worker share.

use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::api::UniqueId;
use super::driver::Driver;
use super::item::Item;
use super::lane::{Comms, Key};
use super::library::Library;
use super::registered::Registration;
use crate::error::CommError;
use crate::pool::BufferPool;
use crate::process::{Bulletin, Slot};

#[derive(Debug)]
pub(super) struct Shared {
    pub library: Arc<Library>,
    pub driver: Arc<dyn Driver>,
    pub bulletin: Arc<dyn Bulletin>,
    pub pool: Arc<BufferPool>,
    /// How long an id is waited for, from a rank that posts it.
    pub patience: Duration,
    pub comms: Comms,
    /// The first thing that went wrong; every later call fails with it.
    failure: Mutex<Option<CommError>>,
    registration: Mutex<Registration>,
}

/// What the worker is told to do.
pub(super) enum Command {
    /// A communicator by unique id; the rank 0 of it posts the id.
    Open {
        key: Key,
        rank: usize,
        size: usize,
        told: Arc<Slot>,
    },
    /// The id of one, or why there is none.
    Id {
        key: Key,
        id: Result<UniqueId, String>,
    },
    /// Calls that are one launch.
    Calls(Vec<Item>),
    Split(Split),
    /// Something that calls wait for has come.
    Wake,
    Close {
        until: Instant,
        told: SyncSender<Result<(), String>>,
    },
    Quit,
}

/// This rank's part in a split.
#[derive(Debug)]
pub(super) struct Split {
    pub parent: Key,
    /// The communicator that comes of it, with the number of its part and this rank's place there; none
    /// for a part of one rank.
    pub part: Option<(Key, usize, usize)>,
    pub told: Arc<Slot>,
}

impl Shared {
    pub fn new(
        library: Arc<Library>,
        driver: Arc<dyn Driver>,
        bulletin: Arc<dyn Bulletin>,
        pool: Arc<BufferPool>,
        patience: Duration,
        registered: bool,
    ) -> Arc<Self> {
        let registration = Registration::of(registered, &library);
        Arc::new(Self {
            library,
            driver,
            bulletin,
            pool,
            patience,
            comms: Comms::default(),
            failure: Mutex::default(),
            registration: Mutex::new(registration),
        })
    }

    /// What went wrong first, if something did.
    pub fn failure(&self) -> Option<CommError> {
        lock(&self.failure).clone()
    }

    /// Notes what went wrong; only the first counts.
    pub fn fail(&self, error: &CommError) {
        lock(&self.failure).get_or_insert_with(|| {
            tracing::error!("{error}");
            error.clone()
        });
    }

    pub fn registration(&self) -> Registration {
        lock(&self.registration).clone()
    }

    /// Does without registered memory from now on.
    pub fn refuse_registration(&self, reason: String) {
        tracing::warn!("nccl: no registered buffers: {reason}");
        *lock(&self.registration) = Registration::Refused(reason);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
