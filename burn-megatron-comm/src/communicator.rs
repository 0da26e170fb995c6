//! The [`Communicator`] trait and the [`Group`] it connects.

use std::fmt;
use std::sync::Arc;

use crate::buffer::{Buffer, DType, Element};
use crate::call::{Call, ReduceOp};
use crate::device::DeviceCommunicator;
use crate::error::CommError;
use crate::pending::Pending;
use crate::pool::BufferPool;
use burn_megatron_rendezvous::list_ranks;

/// The ranks of a communicator, and the index of this rank among them.
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

    /// The first of `groups` that contains this rank, with its number.
    pub fn part(&self, name: &str, groups: &[Vec<usize>]) -> Option<(usize, Group)> {
        let own = self.world_rank();
        groups.iter().enumerate().find_map(|(number, ranks)| {
            let index = ranks.iter().position(|rank| *rank == own)?;
            Some((number, Group::new(name, ranks.clone(), index)))
        })
    }
}

impl fmt::Display for Group {
    /// The name and the world ranks: `tensor [2, 3]`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} [{}]", self.name, list_ranks(&self.ranks))
    }
}

/// Collectives and point-to-point messages between the ranks of one group.
///
/// All ranks of a group must issue the same collectives on it in the same order; every call is compared,
/// and a difference is a [`CommError::Mismatch`]. Messages ([`send`](Self::send),
/// [`receive`](Self::receive)) are ordered per pair of ranks and are not counted as collectives.
///
/// An engine implements [`group`](Self::group), [`start`](Self::start) and [`split`](Self::split); the
/// other methods call `start`. A wrapper also forwards [`pool`](Self::pool) and
/// [`begin_step`](Self::begin_step), and [`start_all`](Self::start_all) if it does not change single
/// calls. The `start_` methods return at once, the others wait for the result. Roots and peers are
/// indices in the group, counts are in elements. Every method fails with [`CommError::InvalidCall`] before
/// anything is sent if its arguments are invalid; for errors of a wait see [`CommError`].
pub trait Communicator: Send + Sync + fmt::Debug + 'static {
    /// The ranks of this communicator.
    fn group(&self) -> &Group;

    /// Starts a call and returns without waiting for other ranks.
    fn start(&self, call: Call, input: Buffer) -> Result<Pending, CommError>;

    /// Splits the group and returns the communicator of the part that contains this rank.
    ///
    /// `groups` holds world ranks: each rank of this group in exactly one part. The order inside a part is
    /// the order of the new group.
    ///
    /// Collective: call on all ranks of the group, with the same arguments; they are compared.
    ///
    /// # Errors
    /// [`CommError::InvalidCall`] if `groups` is not a partition of this group's ranks.
    fn split(&self, name: &str, groups: &[Vec<usize>]) -> Result<Arc<dyn Communicator>, CommError>;

    /// Starts several calls at once, which an engine may fuse into one launch. The handles are in the order
    /// of the calls.
    ///
    /// Equal to starting them one after the other, except that all are checked before the first is sent.
    /// All ranks must pass the same calls in the same order.
    ///
    /// # Errors
    /// [`CommError::InvalidCall`] for the first invalid call, with nothing sent; otherwise the error of the
    /// first start that fails.
    fn start_all(&self, calls: Vec<(Call, Buffer)>) -> Result<Vec<Pending>, CommError> {
        for (call, input) in &calls {
            call.check(self.group(), input)?;
        }
        let calls = calls.into_iter();
        calls.map(|(call, input)| self.start(call, input)).collect()
    }

    /// The pool that results are allocated from, if the engine has one. A result that is
    /// [given back](BufferPool::give) saves the next call an allocation.
    fn pool(&self) -> Option<&Arc<BufferPool>> {
        None
    }

    /// Records that this rank begins a step; a trainer counts them from 1. Call logs, failure reports and fault injection
    /// use it; wrappers forward it.
    fn begin_step(&self, _step: u64) {}

    /// The calls on tensors in device memory, if the engine has them. A wrapper forwards it if it does not
    /// change the calls; otherwise tensors go through host memory.
    fn on_device(&self) -> Option<&dyn DeviceCommunicator> {
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

    /// The buffers of all ranks, concatenated in group order: `[n] -> [size * n]`.
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

    /// The buffer of the root: `[n] -> [n]`. The others pass a buffer of the same length and type, which is
    /// not read.
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

    /// Sends `send[i]` elements to each rank `i` and receives `receive[i]` from it, both in group order:
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

    /// Sends a buffer to one rank.
    fn send(&self, input: Buffer, to: usize) -> Result<(), CommError> {
        self.start_send(input, to)?.wait().map(drop)
    }

    /// Starts [`receive`](Self::receive). Receives match messages in the order they are started.
    fn start_receive(&self, from: usize, dtype: DType, len: usize) -> Result<Pending, CommError> {
        self.start(Call::Receive { from, dtype, len }, Buffer::empty(dtype))
    }

    /// The next buffer that `from` sends to this rank, which must be of this type and length.
    fn receive(&self, from: usize, dtype: DType, len: usize) -> Result<Buffer, CommError> {
        self.start_receive(from, dtype, len)?.wait()
    }

    /// Starts [`barrier`](Self::barrier).
    fn start_barrier(&self) -> Result<Pending, CommError> {
        self.start(Call::Barrier, Buffer::empty(DType::U8))
    }

    /// Returns once every rank of the group has called it.
    fn barrier(&self) -> Result<(), CommError> {
        self.start_barrier()?.wait().map(drop)
    }
}

impl dyn Communicator + '_ {
    /// The reduction of one value of each rank.
    pub fn all_reduce_scalar<T: Element>(&self, value: T, op: ReduceOp) -> Result<T, CommError> {
        Ok(self.all_reduce(T::into_buffer(vec![value]), op)?.into_vec()[0])
    }

    /// The value of the root. That of the others is not read.
    pub fn broadcast_scalar<T: Element>(&self, value: T, root: usize) -> Result<T, CommError> {
        Ok(self
            .broadcast(T::into_buffer(vec![value]), root)?
            .into_vec()[0])
    }
}
