//! The state that the transport and its worker share.

use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::call::NcclCall;
use super::collective_streams::CollectiveStreams;
use super::communicator::{CommKey, LiveComms};
use super::driver::DeviceDriver;
use super::library::{Comm, Library};
use super::opening::Opening;
use super::registered::{CopyCount, Registration};
use crate::error::CommError;
use crate::nccl_config::{NcclConfig, NcclGroup};
use crate::pool::BufferPool;
use crate::process::{KeyValueStore, ResultSlot};

#[derive(Debug)]
pub(super) struct EngineState {
    pub library: Arc<Library>,
    pub driver: Arc<dyn DeviceDriver>,
    pub store: Arc<dyn KeyValueStore>,
    pub pool: Arc<BufferPool>,
    /// The time to wait for a unique id from the rank that publishes it.
    pub timeout: Duration,
    pub config: NcclConfig,
    pub streams: CollectiveStreams,
    pub comms: LiveComms,
    pub copies: CopyCount,
    /// The first error; every later call fails with it.
    pub first_failure: Mutex<Option<CommError>>,
    pub registration_state: Mutex<Registration>,
}

/// A request to the worker.
pub(super) enum WorkerCommand {
    /// Creates a communicator by unique id.
    Open {
        opening: Opening,
        reply: Arc<ResultSlot>,
    },
    /// A communicator that another thread has created, or why it could not.
    Opened {
        key: CommKey,
        result: Result<Comm, String>,
    },
    /// Calls that are launched together.
    Calls(Vec<NcclCall>),
    Split(Split),
    /// Something that calls wait for is ready.
    Wake,
    Close {
        until: Instant,
        reply: SyncSender<Result<(), String>>,
    },
    Quit,
}

/// This rank's side of a split.
#[derive(Debug)]
pub(super) struct Split {
    pub parent: CommKey,
    /// The new communicator, with the number of its part and this rank's index there; none for a part of one
    /// rank.
    pub part: Option<(CommKey, usize, usize)>,
    /// Whose settings the new communicator has.
    pub group: NcclGroup,
    pub reply: Arc<ResultSlot>,
}

impl EngineState {
    /// Returns the first error, if any.
    pub fn first_error(&self) -> Option<CommError> {
        self.first_failure.lock().clone()
    }

    /// Records an error; only the first is kept.
    pub fn fail(&self, error: &CommError) {
        self.first_failure.lock().get_or_insert_with(|| {
            tracing::error!("{error}");
            error.clone()
        });
    }

    pub fn registration(&self) -> Registration {
        self.registration_state.lock().clone()
    }

    /// Stops using registered memory.
    pub fn disable_registration(&self, reason: String) {
        tracing::warn!("nccl: registered buffers are not available: {reason}");
        *self.registration_state.lock() = Registration::Unavailable(reason);
    }
}
