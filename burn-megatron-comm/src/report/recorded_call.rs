//! A call that is recorded in the flight recorder of its rank from its start to its completion. All engines use it.

use std::sync::Arc;
use std::time::Duration;

use tracing::span::EnteredSpan;
use tracing::trace_span;

use crate::buffer::Buffer;
use crate::call::{Call, Operation, Signature};
use crate::communicator::Group;
use crate::error::CommError;
use crate::report::flight_recorder::FlightRecorder;

/// A call that has a sequence number and is recorded.
#[derive(Clone, Debug)]
pub(crate) struct RecordedCall {
    pub group: Arc<Group>,
    pub signature: Arc<Signature>,
    /// The sequence number of the collective in the group. Messages are counted separately for each pair of ranks.
    pub sequence: u64,
    recorder: Arc<FlightRecorder>,
    /// The key of the entry in the flight recorder.
    key: u64,
}

/// Enters the `tracing` span in which a call is started.
pub(crate) fn start_span(signature: &Signature, group: &Group) -> EnteredSpan {
    trace_span!(
        "collective.start",
        op = signature.name(),
        group = group.name(),
        len = signature.len,
        dtype = signature.dtype.name(),
    )
    .entered()
}

impl RecordedCall {
    /// Records the start of a call.
    pub fn begin(
        recorder: &Arc<FlightRecorder>,
        group: &Arc<Group>,
        signature: Arc<Signature>,
        sequence: u64,
    ) -> Self {
        Self {
            key: recorder.start(sequence, group, &signature),
            group: Arc::clone(group),
            signature,
            sequence,
            recorder: Arc::clone(recorder),
        }
    }

    /// Records that the rank waits in the call.
    pub fn mark_waiting(&self) {
        self.recorder.mark_waiting(self.key);
    }

    /// Records that the call has completed.
    pub fn complete(&self) {
        self.recorder.complete(self.key);
    }

    /// Runs the wait of the call. Records that the wait has begun and, if it succeeds, that the call has completed.
    pub fn run_wait<R>(&self, wait: impl FnOnce() -> Result<R, CommError>) -> Result<R, CommError> {
        let _span = trace_span!(
            "collective.wait",
            op = self.signature.name(),
            group = self.group.name(),
            len = self.signature.len,
            dtype = self.signature.dtype.name(),
        )
        .entered();
        self.mark_waiting();
        wait().inspect(|_| self.complete())
    }

    /// Returns the timeout of the wait of the call.
    pub fn timeout(&self) -> Duration {
        self.recorder.deadline(self.sequence)
    }

    /// Describes the call with its length and type.
    pub fn describe(&self) -> String {
        self.signature.describe(&self.group)
    }

    /// Creates the error for a mismatch with another rank, which issued its call first.
    pub fn mismatch(&self, rank: usize, call: String, reason: String) -> CommError {
        CommError::Mismatch {
            group: self.group.to_string(),
            sequence: self.sequence,
            first_rank: rank,
            first_call: call,
            second_rank: self.group.world_rank(),
            second_call: self.describe(),
            reason,
        }
    }

    /// Checks that a received message has the type and the length that the receive expects.
    pub fn check_message(&self, message: Buffer) -> Result<Buffer, CommError> {
        let Operation::Call(Call::Receive { from, dtype, len }) = self.signature.operation else {
            return Ok(message);
        };
        let differ = if message.dtype() != dtype {
            "types"
        } else if message.len() != len {
            "lengths"
        } else {
            return Ok(message);
        };
        let to = self.group.index();
        let sent = Signature::new(Call::Send { to }, &message).describe(&self.group);
        let sender = self.group.ranks()[from];
        Err(self.mismatch(sender, sent, format!("the {differ} differ")))
    }

    /// Creates the error for a rank that has returned without joining the call.
    pub fn peer_finished(&self, rank: usize) -> CommError {
        CommError::PeerFinished {
            rank,
            group: self.group.to_string(),
            sequence: self.sequence,
            call: self.describe(),
        }
    }

    /// Creates the error for the ranks in `missing`, which have not joined the call before the timeout.
    pub fn deadline_error(&self, missing: Vec<usize>, waited: Duration) -> CommError {
        let waiting = if self.signature.is_message() {
            vec![self.group.world_rank()]
        } else {
            let joined = self.group.ranks().iter().copied();
            joined.filter(|rank| !missing.contains(rank)).collect()
        };
        CommError::Deadline {
            group: self.group.to_string(),
            sequence: self.sequence,
            call: self.describe(),
            missing,
            waiting,
            waited,
        }
    }
}
