//! A call of a rank that is a process, from its start to its completion.

use std::collections::HashSet;
use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::result_slot::ResultSlot;
use super::transport::{Job, pair_id};
use super::world::ProcessWorld;
use crate::buffer::Buffer;
use crate::call::{Call, Operation};
use crate::error::CommError;
use crate::report::recorded_call::RecordedCall;
use burn_megatron_rendezvous::{CallId, GroupId};

/// The interval at which a waiting rank checks whether another rank has failed.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A call that was recorded, and the world to which it belongs.
#[derive(Clone, Debug)]
pub(crate) struct ProcessCall {
    pub world: Arc<ProcessWorld>,
    pub group_id: GroupId,
    pub recorded: RecordedCall,
}

impl Deref for ProcessCall {
    type Target = RecordedCall;

    fn deref(&self) -> &RecordedCall {
        &self.recorded
    }
}

impl ProcessCall {
    /// Creates the job for the transport.
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

    /// Waits until the engine sets the slot of a call on the device.
    pub fn wait_passed(&self, slot: &ResultSlot) -> Result<(), CommError> {
        let reached = self.wait(slot).map(drop);
        reached.inspect_err(|error| self.world.record_failed_call(error))
    }

    /// Completes a call that requires no other rank.
    pub fn finish_locally(&self, result: Buffer) -> Result<Buffer, CommError> {
        self.world.check()?;
        self.complete();
        Ok(result)
    }

    /// Waits for the result of the call.
    pub fn finish(&self, slot: &ResultSlot) -> Result<Buffer, CommError> {
        // Transports compare messages too, but a rank's messages to itself bypass the transport.
        let result = self.run_wait(|| self.check_message(self.wait(slot)?));
        result.inspect_err(|error| self.world.record_failed_call(error))
    }

    fn wait(&self, slot: &ResultSlot) -> Result<Buffer, CommError> {
        let began = Instant::now();
        let timeout = self.timeout();
        loop {
            let waited = began.elapsed();
            let left = timeout.saturating_sub(waited);
            if let Some(result) = slot.take_within(POLL_INTERVAL.min(left)) {
                return result;
            }
            self.world.check()?;
            self.check_returned()?;
            if left.is_zero() {
                return Err(self.late(waited));
            }
        }
    }

    /// Returns an error if a rank that must join the call has returned.
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
        returned.map_or(Ok(()), |rank| Err(self.peer_finished(rank)))
    }

    /// Returns the call that the member with index `index` must issue: the same collective, or the send of the message.
    fn call_by(&self, index: usize) -> CallId {
        let group = match self.signature.operation {
            Operation::Call(Call::Receive { .. }) => {
                pair_id(self.group_id, index, self.group.index())
            }
            _ => self.group_id,
        };
        CallId {
            group,
            sequence: self.sequence,
        }
    }

    /// Returns the error for a call that has not completed before the timeout. There are three possible reasons: a rank
    /// is missing, a rank issued a different call, or the transport hangs.
    fn late(&self, waited: Duration) -> CommError {
        let ranks = self.group.ranks();
        let missing = match self.signature.operation {
            Operation::Call(Call::Receive { from: peer, .. } | Call::Send { to: peer }) => {
                vec![ranks[peer]]
            }
            _ => match self.missing_members() {
                Ok(missing) => missing,
                Err(mismatch) => return mismatch,
            },
        };
        if !missing.is_empty() {
            return self.deadline_error(missing, waited);
        }
        let message = format!(
            "all ranks have joined call {} {} over {}, but it has not completed after {:.1} s{}: is a network link \
             down?",
            self.sequence,
            self.describe(),
            self.group,
            waited.as_secs_f64(),
            self.not_received()
        );
        CommError::engine(self.world.transport.name(), message)
    }

    /// Returns the members of the group that have not joined the collective.
    ///
    /// # Errors
    /// [`CommError::Mismatch`] if a member has issued a different call.
    fn missing_members(&self) -> Result<Vec<usize>, CommError> {
        let (ranks, own, call) = (self.group.ranks(), self.group.world_rank(), self.describe());
        let asked = self.call_by(self.group.index());
        let found = self.world.rendezvous.missing_ranks(asked, ranks);
        let calls = found.calls.iter();
        let others = calls.flat_map(|(call, ranks)| ranks.iter().map(move |r| (r, call)));
        let other = others
            .filter(|(rank, other)| *rank != own && !agree(&call, other))
            .min();
        if let Some((rank, other)) = other {
            return Err(self.mismatch(rank, other.clone(), "the calls differ".into()));
        }
        let absent: HashSet<usize> = found.absent.iter().collect();
        let missing = ranks.iter().copied();
        Ok(missing
            .filter(|rank| *rank != own && absent.contains(rank))
            .collect())
    }

    /// Describes the ranks whose data has not arrived. Returns an empty string if the transport does not provide this
    /// information.
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

/// Returns whether the descriptions of two calls match. For an all_to_all, only the names of the operations are
/// compared, because the counts differ between ranks.
fn agree(one: &str, other: &str) -> bool {
    let is_all_to_all = |call: &str| call.split_whitespace().next() == Some("all_to_all");
    one == other || (is_all_to_all(one) && is_all_to_all(other))
}
