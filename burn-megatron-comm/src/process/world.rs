//! The state that all communicators of one process share.

use std::io;
use std::sync::Arc;

use parking_lot::Mutex;

use super::call_tracker::CallTracker;
use super::device::DeadlineWatcher;
use super::transport::Transport;
use crate::error::CommError;
use burn_megatron_rendezvous::{FailureCause, FailureKind, FailureReport, RendezvousClient};

/// The connections of a rank to the other ranks: the transport and the rendezvous.
#[derive(Debug)]
pub(crate) struct ProcessWorld {
    /// The connection to the rendezvous.
    pub rendezvous: Arc<RendezvousClient>,
    /// The transport of all calls.
    pub transport: Arc<dyn Transport>,
    /// The tracker of the rank's calls.
    pub tracker: Arc<CallTracker>,
    /// The last call on this rank that failed.
    failed_call: Mutex<Option<CommError>>,
    /// A thread that checks the timeouts of calls on the device.
    pub deadline_watcher: DeadlineWatcher,
}

impl ProcessWorld {
    /// Creates the state of a rank that has joined its world.
    pub fn new(
        rendezvous: Arc<RendezvousClient>,
        transport: Arc<dyn Transport>,
        tracker: &Arc<CallTracker>,
    ) -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            rendezvous,
            transport,
            tracker: Arc::clone(tracker),
            failed_call: Mutex::default(),
            deadline_watcher: DeadlineWatcher::start()?,
        }))
    }

    /// Reports that a call has failed for which the rank does not wait. This ends the world.
    pub fn fail_with(&self, error: &CommError) {
        self.record_failed_call(error);
        if let Some(cause) = self.cause_of(error.to_string()) {
            let _ = self
                .rendezvous
                .fail(cause, self.tracker.recorder().position());
        }
    }

    /// Returns an error if any rank of the world has failed.
    pub fn check(&self) -> Result<(), CommError> {
        let failure = self.rendezvous.failure();
        failure.map_or(Ok(()), |failure| Err(peer_failed(&failure)))
    }

    /// Records that a call has failed.
    pub fn record_failed_call(&self, error: &CommError) {
        *self.failed_call.lock() = Some(error.clone());
    }

    /// Returns the cause of this rank's failure. `message` is its error message. Returns `None` if another rank caused
    /// the failure.
    pub fn cause_of(&self, message: String) -> Option<FailureCause> {
        let failed = self.failed_call.lock();
        let call = failed.as_ref();
        let kind = match call.filter(|call| message.contains(&call.to_string())) {
            Some(CommError::PeerFailed { .. }) => return None,
            Some(CommError::Mismatch { .. }) => FailureKind::Mismatch,
            Some(CommError::Deadline { .. } | CommError::PeerFinished { .. }) => {
                FailureKind::Timeout
            }
            Some(CommError::Engine { .. }) => FailureKind::Transport,
            Some(CommError::InvalidCall { .. }) | None => FailureKind::OwnError,
        };
        Some(FailureCause { kind, message })
    }
}

/// Creates the error of a call after another rank has failed.
pub(crate) fn peer_failed(failure: &FailureReport) -> CommError {
    CommError::PeerFailed {
        rank: failure.rank,
        message: failure.message.clone(),
    }
}
