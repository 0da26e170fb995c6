//! The interface of an engine whose ranks are processes. The engine transfers the data of calls that have already been
//! checked, numbered and recorded.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use burn_megatron_rendezvous::GroupId;

use super::on_device::DeviceTransport;
use super::result_slot::ResultSlot;
use crate::buffer::Buffer;
use crate::call::{Signature, digest};
use crate::communicator::Group;
use crate::error::CommError;
use crate::pool::BufferPool;

/// Returns the id of the group that is part number `part` of a split. The split was call number `sequence` of `group`.
pub(crate) fn part_id(group: GroupId, sequence: u64, part: usize) -> GroupId {
    GroupId(digest(1, [group.0, sequence, part as u64]))
}

/// Returns the id for messages from one member of a group to another member, given by their indices.
pub(super) fn pair_id(group: GroupId, from: usize, to: usize) -> GroupId {
    GroupId(digest(2, [group.0, from as u64, to as u64]))
}

/// A call of this rank on a host buffer or on a tensor, in the form in which it is passed to the transport.
#[derive(Debug)]
#[allow(dead_code, reason = "each engine reads what it needs")]
pub(crate) struct Job<Input = Buffer> {
    /// The group, from the view of this rank.
    pub group: Arc<Group>,
    /// The id of the group.
    pub group_id: GroupId,
    /// The sequence number of the collective in the group, counted from 0. Messages are counted separately for each
    /// sender and receiver.
    pub sequence: u64,
    /// The operation with its type and length. It has already been checked by [`Call::check`](crate::Call::check).
    pub signature: Arc<Signature>,
    /// The input of this rank. A buffer returns to the pool when the call no longer needs it. If the call is a receive
    /// on a tensor, the input is empty.
    pub input: Input,
    /// The slot for the result or the error. If no other reference to the slot exists, the result is discarded, but the
    /// call is still executed. For a call on a tensor, the slot is set to an empty buffer when the device has completed
    /// the call.
    pub slot: Arc<ResultSlot>,
}

/// The transport of one process, which is shared by all groups of the rank.
///
/// Only [`share`](Self::share) and [`close`](Self::close) wait for other ranks. The error of a call is put into the
/// slot of the call.
pub(crate) trait Transport: fmt::Debug + Send + Sync {
    /// Returns the name of the engine, for example `"mpi"`.
    fn name(&self) -> &'static str;

    /// Returns the name and the version of the library, for the header of a run.
    fn description(&self) -> String;

    /// Broadcasts the address of the rendezvous server from rank 0, which passes the address as `own`. Called before
    /// any group is used. Waits for the other ranks.
    ///
    /// # Errors
    /// An error of the transport, or a timeout if the other ranks do not call this method within `timeout`.
    fn share(&self, own: Option<&[u8]>, timeout: Duration) -> Result<Vec<u8>, CommError>;

    /// Returns the buffer pool of this rank. Results are allocated from this pool, and inputs return to it.
    fn pool(&self) -> &Arc<BufferPool>;

    /// Starts collectives and messages of one group in the given order. If possible, they are fused into one launch.
    fn start(&self, jobs: Vec<Job>);

    /// Returns the interface for device tensors, or `None` if the engine has none.
    fn device(&self) -> Option<&dyn DeviceTransport> {
        None
    }

    /// Starts a split. `job` contains the [`Operation::Split`](crate::call::Operation::Split). `part` is the new group
    /// that contains this rank. The slot is set to an empty buffer as soon as the new group may be used.
    fn split(&self, job: Job, part: Arc<Group>, part_id: GroupId);

    /// Returns the ranks whose data for this call has not arrived, as indices in the group. Returns `None` if the
    /// transport does not provide this information.
    fn missing(&self, _group_id: GroupId, _sequence: u64) -> Option<Vec<usize>> {
        None
    }

    /// Aborts all calls in flight after a rank has failed. The slots of these calls stay empty. May be called several
    /// times and from any thread.
    fn abort(&self);

    /// Closes the transport after the last call.
    ///
    /// Collective: call on all ranks of the world.
    ///
    /// # Errors
    /// An error of the transport, or a timeout if the transport is not closed within `deadline`.
    fn close(&self, deadline: Duration) -> Result<(), CommError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_groups_and_pairs_are_unique() {
        let mut seen = vec![GroupId::WORLD];
        for parent in [GroupId::WORLD, part_id(GroupId::WORLD, 0, 0)] {
            for sequence in 0..50 {
                seen.extend((0..50).map(|part| part_id(parent, sequence, part)));
                seen.extend((0..50).map(|to| pair_id(parent, sequence as usize, to)));
            }
        }
        let count = seen.len();
        seen.sort();
        seen.dedup();
        assert_eq!(seen.len(), count);
    }
}
