//! One rank's part in one call, from its start to its end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::tensor::Tensor;
use tracing::trace_span;

use super::on_device::DeviceJob;
use super::slot::Slot;
use super::transport::{GroupId, Job};
use super::world::ProcessWorld;
use crate::buffer::Buffer;
use crate::call::{Call, Operation, Signature};
use crate::communicator::Group;
use crate::error::CommError;
use crate::rendezvous::CallOf;

/// How often a rank that waits looks whether the world has failed.
const LOOK: Duration = Duration::from_millis(20);

/// A call that has a number and an entry in the journal.
#[derive(Clone, Debug)]
pub(crate) struct Visit {
    pub world: Arc<ProcessWorld>,
    pub group: Arc<Group>,
    pub group_id: GroupId,
    pub signature: Arc<Signature>,
    pub sequence: u64,
    /// The key of the entry in the journal.
    pub key: u64,
}

impl Visit {
    /// The work for the transport.
    pub fn job(&self, input: Buffer, slot: &Arc<Slot>) -> Job {
        Job {
            group: Arc::clone(&self.group),
            group_id: self.group_id,
            sequence: self.sequence,
            signature: Arc::clone(&self.signature),
            input,
            slot: Arc::clone(slot),
        }
    }

    /// The work for the transport of a tensor that stays on its device.
    pub fn device_job(&self, input: Tensor<1>, passed: &Arc<Slot>) -> DeviceJob {
        DeviceJob {
            group: Arc::clone(&self.group),
            group_id: self.group_id,
            sequence: self.sequence,
            signature: Arc::clone(&self.signature),
            input,
            passed: Arc::clone(passed),
        }
    }

    /// Waits until the engine says that a call on a device has got so far.
    pub fn launched(&self, slot: &Slot) -> Result<(), CommError> {
        let reached = self.wait(slot).map(drop);
        reached.inspect_err(|error| self.world.note(error))
    }

    /// Notes that the call has its result.
    pub fn complete(&self) {
        self.world.desk().journal().complete(self.key);
    }

    /// The wait of a call that needs no other rank.
    pub fn finish_at_once(&self, result: Buffer) -> Result<Buffer, CommError> {
        self.world.check()?;
        self.complete();
        Ok(result)
    }

    /// Waits for the result.
    pub fn finish(&self, slot: &Slot) -> Result<Buffer, CommError> {
        let _span = trace_span!(
            "collective.wait",
            op = self.signature.name(),
            group = self.group.name(),
            len = self.signature.len,
            dtype = self.signature.dtype.name(),
        )
        .entered();
        let journal = self.world.desk().journal();
        journal.block(self.key);
        let result = self.wait(slot).and_then(|result| self.check_letter(result));
        match &result {
            Ok(_) => self.complete(),
            Err(error) => self.world.note(error),
        }
        result
    }

    fn wait(&self, slot: &Slot) -> Result<Buffer, CommError> {
        let began = Instant::now();
        let patience = self.world.desk().journal().deadline(self.sequence);
        loop {
            let waited = began.elapsed();
            let left = patience.saturating_sub(waited);
            if let Some(result) = slot.take_within(LOOK.min(left)) {
                return result;
            }
            self.world.check()?;
            self.check_returned()?;
            if left.is_zero() {
                return Err(self.overdue(waited));
            }
        }
    }

    /// A message of this rank to itself has not been compared by a transport.
    fn check_letter(&self, letter: Buffer) -> Result<Buffer, CommError> {
        let Operation::Call(Call::Receive { from, dtype, len }) = self.signature.operation else {
            return Ok(letter);
        };
        let reason = match (letter.dtype() == dtype, letter.len() == len) {
            (true, true) => return Ok(letter),
            (false, _) => "the types differ",
            (true, false) => "the lengths differ",
        };
        let send = Call::Send {
            to: self.group.index(),
        };
        Err(CommError::Mismatch {
            group: self.group.to_string(),
            sequence: self.sequence,
            first_rank: self.group.ranks()[from],
            first_call: Signature::new(send, &letter).describe(&self.group),
            second_rank: self.group.world_rank(),
            second_call: self.signature.describe(&self.group),
            reason: reason.into(),
        })
    }

    /// Fails if a rank that must come has returned before.
    fn check_returned(&self) -> Result<(), CommError> {
        let own = self.group.index();
        let is_missing = |index: &usize| {
            let call = self.call_by(*index);
            let rank = self.group.ranks()[*index];
            self.world.member().has_returned_before(rank, call)
        };
        let gone = match self.signature.operation {
            Operation::Call(Call::Receive { from, .. }) => Some(from).filter(is_missing),
            Operation::Call(Call::Send { .. }) => None,
            _ => (0..self.group.size())
                .filter(|i| *i != own)
                .find(is_missing),
        };
        match gone {
            None => Ok(()),
            Some(index) => Err(CommError::PeerFinished {
                rank: self.group.ranks()[index],
                group: self.group.to_string(),
                sequence: self.sequence,
                call: self.signature.describe(&self.group),
            }),
        }
    }

    /// What the member `index` must come to: the collective, or the sending of the message.
    fn call_by(&self, index: usize) -> CallOf {
        let group = match self.signature.operation {
            Operation::Call(Call::Receive { .. }) => self.group_id.pair(index, self.group.index()),
            _ => self.group_id,
        };
        CallOf {
            group: group.0,
            sequence: self.sequence,
        }
    }

    /// Why the call has not completed in time: who has not come, who came with another call, or that the
    /// transport stands still.
    fn overdue(&self, waited: Duration) -> CommError {
        let own = self.group.world_rank();
        let (ranks, call) = (self.group.ranks(), self.signature.describe(&self.group));
        let (missing, waiting) = match self.signature.operation {
            Operation::Call(Call::Receive { from, .. }) => (vec![ranks[from]], vec![own]),
            Operation::Call(Call::Send { to }) => (vec![ranks[to]], vec![own]),
            _ => {
                let found = self
                    .world
                    .member()
                    .whereabouts(self.call_by(self.group.index()));
                let other = found.calls.iter().find(|(rank, other)| {
                    ranks.contains(rank) && *rank != own && !agree(&call, other)
                });
                if let Some((rank, other)) = other {
                    return CommError::Mismatch {
                        group: self.group.to_string(),
                        sequence: self.sequence,
                        first_rank: *rank,
                        first_call: other.clone(),
                        second_rank: own,
                        second_call: call,
                        reason: "the calls differ".into(),
                    };
                }
                let came = |rank: &usize| *rank == own || !found.absent.contains(rank);
                ranks.iter().partition(|rank| !came(rank))
            }
        };
        if missing.is_empty() {
            let unheard = self.unheard();
            return CommError::Engine {
                engine: self.world.transport().name().into(),
                message: format!(
                    "all ranks have come to call {} {call} over {}, but it is not complete after \
                     {:.1} s{unheard}: is a link between them cut?",
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

    /// Whose part has not reached this rank, if the transport knows.
    fn unheard(&self) -> String {
        let transport = self.world.transport();
        let missing = transport.missing(self.group_id, self.sequence);
        let rank = |index: usize| self.group.ranks()[index].to_string();
        let ranks: Vec<_> = missing.unwrap_or_default().into_iter().map(rank).collect();
        match ranks.is_empty() {
            true => String::new(),
            false => format!(" (nothing came from rank {})", ranks.join(", ")),
        }
    }
}

/// Whether two ranks describe the same call; each gives its own counts to an all_to_all.
fn agree(one: &str, other: &str) -> bool {
    let name = |call: &str| call.split_whitespace().next() == Some("all_to_all");
    one == other || (name(one) && name(other))
}
