//! A call of one rank, from its start to its completion.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::trace_span;

use super::result_slot::ResultSlot;
use super::transport::{GroupId, Job};
use super::world::ProcessWorld;
use crate::buffer::Buffer;
use crate::call::{Call, Operation, Signature};
use crate::communicator::Group;
use crate::error::CommError;
use crate::rendezvous::CallId;

/// The interval at which a waiting rank checks whether the world has failed.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A call that has been numbered and recorded.
#[derive(Clone, Debug)]
pub(crate) struct ProcessCall {
    pub world: Arc<ProcessWorld>,
    pub group: Arc<Group>,
    pub group_id: GroupId,
    pub signature: Arc<Signature>,
    pub sequence: u64,
    /// The key of its entry in the flight recorder.
    pub key: u64,
}

impl ProcessCall {
    /// The job for the transport.
    pub fn job<Input>(&self, input: Input, slot: &Arc<ResultSlot>) -> Job<Input> {
        Job {
            group: Arc::clone(&self.group),
            group_id: self.group_id,
            sequence: self.sequence,
            signature: Arc::clone(&self.signature),
            input,
            slot: Arc::clone(slot),
        }
    }

    /// Waits until the engine sets a slot of a call on a device.
    pub fn wait_passed(&self, slot: &ResultSlot) -> Result<(), CommError> {
        let reached = self.wait(slot).map(drop);
        reached.inspect_err(|error| self.world.record_failed_call(error))
    }

    /// Records that the call has completed.
    pub fn complete(&self) {
        self.world.tracker.recorder().complete(self.key);
    }

    /// The wait of a call that needs no other rank.
    pub fn finish_locally(&self, result: Buffer) -> Result<Buffer, CommError> {
        self.world.check()?;
        self.complete();
        Ok(result)
    }

    /// Waits for the result.
    pub fn finish(&self, slot: &ResultSlot) -> Result<Buffer, CommError> {
        let _span = trace_span!(
            "collective.wait",
            op = self.signature.name(),
            group = self.group.name(),
            len = self.signature.len,
            dtype = self.signature.dtype.name(),
        )
        .entered();
        let recorder = self.world.tracker.recorder();
        recorder.mark_waiting(self.key);
        let result = self
            .wait(slot)
            .and_then(|result| self.check_message(result));
        match &result {
            Ok(_) => self.complete(),
            Err(error) => self.world.record_failed_call(error),
        }
        result
    }

    fn wait(&self, slot: &ResultSlot) -> Result<Buffer, CommError> {
        let began = Instant::now();
        let timeout = self.world.tracker.recorder().deadline(self.sequence);
        loop {
            let waited = began.elapsed();
            let left = timeout.saturating_sub(waited);
            if let Some(result) = slot.take_within(POLL_INTERVAL.min(left)) {
                return result;
            }
            self.world.check()?;
            self.check_returned()?;
            if left.is_zero() {
                return Err(self.deadline_error(waited));
            }
        }
    }

    /// Compares a message with its receive. Transports do so too, but messages of a rank to itself pass none.
    fn check_message(&self, message: Buffer) -> Result<Buffer, CommError> {
        let Operation::Call(Call::Receive { from, dtype, len }) = self.signature.operation else {
            return Ok(message);
        };
        let reason = if message.dtype() != dtype {
            "the types differ"
        } else if message.len() != len {
            "the lengths differ"
        } else {
            return Ok(message);
        };
        let send = Call::Send {
            to: self.group.index(),
        };
        Err(CommError::Mismatch {
            group: self.group.to_string(),
            sequence: self.sequence,
            first_rank: self.group.ranks()[from],
            first_call: Signature::new(send, &message).describe(&self.group),
            second_rank: self.group.world_rank(),
            second_call: self.signature.describe(&self.group),
            reason: reason.into(),
        })
    }

    /// Fails if a rank that must join the call has returned.
    fn check_returned(&self) -> Result<(), CommError> {
        let (ranks, own) = (self.group.ranks(), self.group.index());
        let (first, others) = match self.signature.operation {
            Operation::Call(Call::Receive { from, .. }) => (from, &ranks[from..=from]),
            Operation::Call(Call::Send { .. }) => return Ok(()),
            _ => (own, ranks),
        };
        // This rank has not returned.
        let call = self.call_by(first);
        let returned = self.world.rendezvous.first_returned(others, call);
        match returned {
            None => Ok(()),
            Some(rank) => Err(CommError::PeerFinished {
                rank,
                group: self.group.to_string(),
                sequence: self.sequence,
                call: self.signature.describe(&self.group),
            }),
        }
    }

    /// The call that the member `index` must make: the collective, or the send of the message.
    fn call_by(&self, index: usize) -> CallId {
        let group = match self.signature.operation {
            Operation::Call(Call::Receive { .. }) => self.group_id.pair(index, self.group.index()),
            _ => self.group_id,
        };
        CallId {
            group: group.0,
            sequence: self.sequence,
        }
    }

    /// Why the call has not completed in time: a rank is missing, a rank made another call, or the transport
    /// hangs.
    fn deadline_error(&self, waited: Duration) -> CommError {
        let own = self.group.world_rank();
        let (ranks, call) = (self.group.ranks(), self.signature.describe(&self.group));
        let (missing, waiting) = match self.signature.operation {
            Operation::Call(Call::Receive { from, .. }) => (vec![ranks[from]], vec![own]),
            Operation::Call(Call::Send { to }) => (vec![ranks[to]], vec![own]),
            _ => {
                let asked = self.call_by(self.group.index());
                let found = self.world.rendezvous.missing_ranks(asked, ranks);
                let calls = found.calls.iter();
                let others = calls.flat_map(|(call, ranks)| ranks.iter().map(move |r| (r, call)));
                let other = others
                    .filter(|(rank, other)| *rank != own && !agree(&call, other))
                    .min();
                if let Some((rank, other)) = other {
                    return CommError::Mismatch {
                        group: self.group.to_string(),
                        sequence: self.sequence,
                        first_rank: rank,
                        first_call: other.clone(),
                        second_rank: own,
                        second_call: call,
                        reason: "the calls differ".into(),
                    };
                }
                let absent: HashSet<usize> = found.absent.iter().collect();
                let joined = |rank: &usize| *rank == own || !absent.contains(rank);
                ranks.iter().partition(|rank| !joined(rank))
            }
        };
        if missing.is_empty() {
            let not_received = self.not_received();
            return CommError::Engine {
                engine: self.world.transport.name().into(),
                message: format!(
                    "all ranks have joined call {} {call} over {}, but it has not completed after \
                     {:.1} s{not_received}: is a network link down?",
                    self.sequence,
                    self.group,
                    waited.as_secs_f64()
                ),
            };
        }
        CommError::Deadline {
            group: self.group.to_string(),
            sequence: self.sequence,
            call,
            missing,
            waiting,
            waited,
        }
    }

    /// The ranks whose data has not arrived, if the transport knows.
    fn not_received(&self) -> String {
        let transport = &self.world.transport;
        let missing = transport.missing(self.group_id, self.sequence);
        let rank = |index: usize| self.group.ranks()[index].to_string();
        let ranks: Vec<_> = missing.unwrap_or_default().into_iter().map(rank).collect();
        if ranks.is_empty() {
            String::new()
        } else {
            format!(" (nothing received from rank {})", ranks.join(", "))
        }
    }
}

/// Whether two descriptions match; those of an all_to_all have counts that differ between ranks.
fn agree(one: &str, other: &str) -> bool {
    let is_all_to_all = |call: &str| call.split_whitespace().next() == Some("all_to_all");
    one == other || (is_all_to_all(one) && is_all_to_all(other))
}
