//! The door to the other ranks of a group.

use std::fmt;
use std::sync::Arc;

use super::buffer::{Buffer, DType};
use super::call::{Call, ReduceOp};
use super::device::OnDevice;
use super::error::{CommError, list_ranks};
use super::pending::Pending;
use super::pool::BufferPool;

/// The ranks that a communicator joins, and the place of this rank among them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    name: String,
    ranks: Vec<usize>,
    index: usize,
}

impl Group {
    /// A group of the world ranks `ranks`, seen from the rank at `index`.
    ///
    /// # Panics
    /// If `index` is not an index of `ranks`.
    pub fn new(name: impl Into<String>, ranks: Vec<usize>, index: usize) -> Self {
        let name = name.into();
        assert!(
            index < ranks.len(),
            "index {index} is outside the {} ranks of {name}",
            ranks.len()
        );
        Self { name, ranks, index }
    }

    /// The name, for example `"tensor"`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The world ranks of the members, in group order.
    pub fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    /// The index of this rank in the group.
    pub fn index(&self) -> usize {
        self.index
    }

    /// The world rank of this rank.
    pub fn world_rank(&self) -> usize {
        self.ranks[self.index]
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.ranks.len()
    }
}

impl fmt::Display for Group {
    /// The name and the world ranks: `tensor [2, 3]`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} [{}]", self.name, list_ranks(&self.ranks))
    }
}

/// The calls between the ranks of one group.
///
/// The ranks of a group must make the same collective calls on it in the same order; every call is
/// compared, and a difference is a [`CommError::Mismatch`]. Messages ([`send`](Self::send),
/// [`receive`](Self::receive)) are ordered per pair of ranks and do not count among the collectives.
///
/// An engine implements [`group`](Self::group), [`start`](Self::start) and [`split`](Self::split); all
/// else goes through `start`. A wrapper also passes [`pool`](Self::pool) and
/// [`begin_step`](Self::begin_step) on, and [`start_all`](Self::start_all) where it has nothing to do to
/// the calls one by one. The `start_` methods return at once, the plain ones wait for the result. Roots and
/// peers are indices inside the group, counts are in elements. Every method fails with
/// [`CommError::InvalidCall`] before anything is sent if the arguments do not fit; what ends a wait, see
/// [`CommError`].
pub trait Communicator: Send + Sync + fmt::Debug + 'static {
    /// The ranks that this communicator joins.
    fn group(&self) -> &Group;

    /// Starts a call and returns without waiting for other ranks.
    fn start(&self, call: Call, input: Buffer) -> Result<Pending, CommError>;

    /// Splits the group and returns the communicator of the part that contains this rank.
    ///
    /// `groups` are the parts, as world ranks: each rank of this group in exactly one of them. The order
    /// inside a part is the order of the new group. Every rank must call this with the same arguments,
    /// which is checked; it counts as a collective.
    ///
    /// # Errors
    /// [`CommError::InvalidCall`] if `groups` is no partition of this group's ranks.
    fn split(&self, name: &str, groups: &[Vec<usize>]) -> Result<Arc<dyn Communicator>, CommError>;

    /// Starts several calls as one: an engine may launch them together and so pay for one launch. The
    /// handles are in the order of the calls.
    ///
    /// It is the same as starting them one after the other, which is what happens unless an engine has
    /// something better, except that all of them are checked before the first is sent. Every rank must
    /// give the same calls in the same order.
    ///
    /// # Errors
    /// [`CommError::InvalidCall`] about the first call that does not fit, with nothing sent; else the
    /// error of the first start that fails.
    fn start_all(&self, calls: Vec<(Call, Buffer)>) -> Result<Vec<Pending>, CommError> {
        for (call, input) in &calls {
            call.check(self.group(), input)?;
        }
        let calls = calls.into_iter();
        calls.map(|(call, input)| self.start(call, input)).collect()
    }

    /// The memory that this rank's calls are made in, if the engine recycles it: results are taken from
    /// it, and who [gives](BufferPool::give) them back saves the next call an allocation.
    fn pool(&self) -> Option<&Arc<BufferPool>> {
        None
    }

    /// Says that this rank begins a step, from 0. Call logs, verdicts and fault injection name it;
    /// engines keep it, wrappers pass it on.
    fn begin_step(&self, _step: u64) {}

    /// The calls on tensors that stay on their device, if the engine reaches one. A wrapper passes it on
    /// where it has nothing to do to the calls; else its tensors go through host memory.
    fn on_device(&self) -> Option<&dyn OnDevice> {
        None
    }

    /// The index of this rank in the group.
    fn rank(&self) -> usize {
        self.group().index()
    }

    /// The number of ranks in the group.
    fn size(&self) -> usize {
        self.group().size()
    }

    /// Starts [`all_reduce`](Self::all_reduce).
    fn start_all_reduce(&self, input: Buffer, op: ReduceOp) -> Result<Pending, CommError> {
        self.start(Call::AllReduce(op), input)
    }

    /// The reduction of the buffers of all ranks: `[n] -> [n]`.
    fn all_reduce(&self, input: Buffer, op: ReduceOp) -> Result<Buffer, CommError> {
        self.start_all_reduce(input, op)?.wait()
    }

    /// Starts [`all_gather`](Self::all_gather).
    fn start_all_gather(&self, input: Buffer) -> Result<Pending, CommError> {
        self.start(Call::AllGather, input)
    }

    /// The buffers of all ranks one after the other, in group order: `[n] -> [size * n]`.
    fn all_gather(&self, input: Buffer) -> Result<Buffer, CommError> {
        self.start_all_gather(input)?.wait()
    }

    /// Starts [`reduce_scatter`](Self::reduce_scatter).
    fn start_reduce_scatter(&self, input: Buffer, op: ReduceOp) -> Result<Pending, CommError> {
        self.start(Call::ReduceScatter(op), input)
    }

    /// This rank's chunk of the reduction of the buffers of all ranks: `[size * n] -> [n]`.
    fn reduce_scatter(&self, input: Buffer, op: ReduceOp) -> Result<Buffer, CommError> {
        self.start_reduce_scatter(input, op)?.wait()
    }

    /// Starts [`broadcast`](Self::broadcast).
    fn start_broadcast(&self, input: Buffer, root: usize) -> Result<Pending, CommError> {
        self.start(Call::Broadcast { root }, input)
    }

    /// The buffer of the root: `[n] -> [n]`. The others give a buffer of the same length and type,
    /// whose contents are not read.
    fn broadcast(&self, input: Buffer, root: usize) -> Result<Buffer, CommError> {
        self.start_broadcast(input, root)?.wait()
    }

    /// Starts [`all_to_all`](Self::all_to_all).
    fn start_all_to_all(
        &self,
        input: Buffer,
        send: Vec<usize>,
        receive: Vec<usize>,
    ) -> Result<Pending, CommError> {
        self.start(Call::AllToAll { send, receive }, input)
    }

    /// Gives `send[i]` elements to each rank `i` and gets `receive[i]` from it, both in group order:
    /// `[sum(send)] -> [sum(receive)]`.
    fn all_to_all(
        &self,
        input: Buffer,
        send: Vec<usize>,
        receive: Vec<usize>,
    ) -> Result<Buffer, CommError> {
        self.start_all_to_all(input, send, receive)?.wait()
    }

    /// Starts [`send`](Self::send).
    fn start_send(&self, input: Buffer, to: usize) -> Result<Pending, CommError> {
        self.start(Call::Send { to }, input)
    }

    /// Gives a buffer to one rank.
    fn send(&self, input: Buffer, to: usize) -> Result<(), CommError> {
        self.start_send(input, to)?.wait().map(drop)
    }

    /// Starts [`receive`](Self::receive). The order of the starts decides which message each one gets.
    fn start_receive(&self, from: usize, dtype: DType, len: usize) -> Result<Pending, CommError> {
        self.start(Call::Receive { from, dtype, len }, Buffer::empty(dtype))
    }

    /// The next buffer that `from` sends to this rank, which must have this type and length.
    fn receive(&self, from: usize, dtype: DType, len: usize) -> Result<Buffer, CommError> {
        self.start_receive(from, dtype, len)?.wait()
    }

    /// Starts [`barrier`](Self::barrier).
    fn start_barrier(&self) -> Result<Pending, CommError> {
        self.start(Call::Barrier, Buffer::empty(DType::U8))
    }

    /// Returns once every rank of the group has come.
    fn barrier(&self) -> Result<(), CommError> {
        self.start_barrier()?.wait().map(drop)
    }
}
