//! The state that the transport shares with its worker.

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
    /// The timeout to wait for a unique id that another rank publishes.
    pub timeout: Duration,
    pub config: NcclConfig,
    pub streams: CollectiveStreams,
    pub comms: LiveComms,
    pub copies: CopyCount,
    /// The first error. Every later call fails with this error.
    pub first_failure: Mutex<Option<CommError>>,
    pub registration_state: Mutex<Registration>,
}

/// A command for the worker.
pub(super) enum WorkerCommand {
    /// Creates a communicator from a unique id.
    Open {
        opening: Opening,
        reply: Arc<ResultSlot>,
    },
    /// Passes on a communicator that another thread has created, or the reason why it was not created.
    Opened {
        key: CommKey,
        result: Result<Comm, String>,
    },
    /// Launches these calls together.
    Calls(Vec<NcclCall>),
    Split(Split),
    /// Reports that a resource for which calls wait is ready.
    Wake,
    Close {
        until: Instant,
        reply: SyncSender<Result<(), String>>,
    },
    Quit,
}

/// The part of this rank in a split.
#[derive(Debug)]
pub(super) struct Split {
    pub parent: CommKey,
    /// The key of the new communicator, the number of the part, and the index of this rank in the part. `None` if the
    /// part consists of one rank.
    pub part: Option<(CommKey, usize, usize)>,
    /// The kind of group whose settings apply to the new communicator.
    pub group: NcclGroup,
    pub reply: Arc<ResultSlot>,
}

impl EngineState {
    /// Returns the first error, or `None` if there was no error.
    pub fn first_error(&self) -> Option<CommError> {
        self.first_failure.lock().clone()
    }

    /// Records an error. Only the first error is kept.
    pub fn fail(&self, error: &CommError) {
        self.first_failure.lock().get_or_insert_with(|| {
            tracing::error!("{error}");
            error.clone()
        });
    }

    pub fn registration(&self) -> Registration {
        self.registration_state.lock().clone()
    }

    /// Disables registered memory. `reason` is the reason.
    pub fn disable_registration(&self, reason: String) {
        tracing::warn!("nccl: registered buffers are not available: {reason}");
        *self.registration_state.lock() = Registration::Unavailable(reason);
    }
}
