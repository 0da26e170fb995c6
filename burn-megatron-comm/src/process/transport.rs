//! What an engine whose ranks are processes has to do: move what has been checked, numbered and logged.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::on_device::DeviceTransport;
use super::slot::Slot;
use crate::buffer::Buffer;
use crate::call::Signature;
use crate::communicator::Group;
use crate::error::CommError;
use crate::pool::BufferPool;

/// The number of a group, the same on all its members and of no other group that shares two ranks with
/// it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct GroupId(pub u64);

impl GroupId {
    /// The group of all ranks.
    pub const WORLD: Self = Self(0);

    /// The part `part` of the split that was call `sequence` of this group.
    pub fn part(self, sequence: u64, part: usize) -> Self {
        self.mixed_with(1, sequence, part as u64)
    }

    /// The messages from one member of this group to another, by their indices.
    pub fn pair(self, from: usize, to: usize) -> Self {
        self.mixed_with(2, from as u64, to as u64)
    }

    fn mixed_with(self, purpose: u64, first: u64, second: u64) -> Self {
        // The finaliser of SplitMix64 (Steele et al. 2014, doi:10.1145/2660193.2660195).
        let mix = |x: u64| {
            let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            x ^ (x >> 31)
        };
        let step = |state: u64, value: u64| {
            mix(state
                .wrapping_add(0x9e37_79b9_7f4a_7c15)
                .wrapping_add(value))
        };
        Self(step(step(step(purpose, self.0), first), second))
    }
}

/// This rank's part in one call, ready to be carried out.
#[derive(Debug)]
#[allow(dead_code, reason = "each engine reads what it needs")]
pub(crate) struct Job {
    /// The group, seen from this rank.
    pub group: Arc<Group>,
    /// The number of the group.
    pub group_id: GroupId,
    /// The number of the collective in the group, from 0; of a message, among those of its ordered pair
    /// of ranks in the group.
    pub sequence: u64,
    /// The operation with its type and length; checked by [`Call::check`](crate::Call::check).
    pub signature: Arc<Signature>,
    /// What this rank gives; it goes home to the pool when the call is done with it.
    pub input: Buffer,
    /// Where the result goes, or what kept it from coming. If nobody holds the other end any more, the
    /// result is not wanted, but the call takes place all the same.
    pub slot: Arc<Slot>,
}

/// The transport of one process. All groups of the rank share it.
///
/// Nothing here waits for other ranks, except [`share`](Self::share) and [`close`](Self::close). Errors of calls go into their
/// slots.
pub(crate) trait Transport: fmt::Debug + Send + Sync {
    /// The name of the engine, for example `"mpi"`.
    fn name(&self) -> &'static str;

    /// What it is and which version, in words, for the header of a run.
    fn description(&self) -> String;

    /// Hands a few bytes from rank 0, which gives them, to all ranks, before any group is used: how the
    /// ranks learn where they meet. Waits for the others.
    ///
    /// # Errors
    /// What the transport reports, or that they have not come within the deadline.
    fn share(&self, own: Option<&[u8]>, patience: Duration) -> Result<Vec<u8>, CommError>;

    /// The memory of this rank's calls: results are taken from it, inputs go home to it.
    fn pool(&self) -> &Arc<BufferPool>;

    /// Starts collectives and messages of one group, in this order, as one launch if it can.
    fn start(&self, jobs: Vec<Job>);

    /// The way for tensors that stay on their device, if the engine has one.
    fn device(&self) -> Option<&dyn DeviceTransport> {
        None
    }

    /// Starts a split: `job` has the [`Operation::Split`](crate::call::Operation::Split), `part` is
    /// the part with this rank. The slot gets an empty buffer when the part may be used.
    fn split(&self, job: Job, part: Arc<Group>, part_id: GroupId);

    /// The indices, in the group of `job`, of the ranks whose part in this call has not come to this
    /// rank, if the transport knows.
    fn missing(&self, group_id: GroupId, sequence: u64) -> Option<Vec<usize>>;

    /// Gives up all that is under way, as a rank has failed: slots that are empty stay so. May be called
    /// from any thread, and more than once.
    fn abort(&self);

    /// Ends the transport after every rank has made its last call; all ranks come here.
    ///
    /// # Errors
    /// What the transport reports, or that it did not end within the deadline.
    fn close(&self, deadline: Duration) -> Result<(), CommError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_have_numbers_of_their_own() {
        let mut seen = vec![GroupId::WORLD];
        for parent in [GroupId::WORLD, GroupId::WORLD.part(0, 0)] {
            for sequence in 0..50 {
                seen.extend((0..50).map(|part| parent.part(sequence, part)));
                seen.extend((0..50).map(|to| parent.pair(sequence as usize, to)));
            }
        }
        let count = seen.len();
        seen.sort();
        seen.dedup();
        assert_eq!(seen.len(), count);
    }
}
