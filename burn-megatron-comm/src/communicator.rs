//! The [`Communicator`] trait, and the [`Group`] of ranks that a communicator connects.

use std::fmt;
use std::sync::Arc;

use crate::buffer::{Buffer, DType, Element};
use crate::call::{Call, ReduceOp};
use crate::device::DeviceCommunicator;
use crate::error::CommError;
use crate::pending::Pending;
use crate::pool::BufferPool;
use burn_megatron_rendezvous::list_ranks;

/// A group of ranks, and the index of this rank in the group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    name: String,
    ranks: Vec<usize>,
    index: usize,
}

impl Group {
    /// Creates a group of the world ranks `ranks`. This rank is `ranks[index]`.
    ///
    /// # Panics
    /// If `index` is not less than the number of ranks.
    pub fn new(name: impl Into<String>, ranks: Vec<usize>, index: usize) -> Self {
        let name = name.into();
        assert!(
            index < ranks.len(),
            "index {index} is outside the {} ranks of {name}",
            ranks.len()
        );
        Self { name, ranks, index }
    }

    /// Returns the name of the group, for example `"tensor"`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the world ranks of the group members, in group order.
    pub fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    /// Returns the index of this rank in the group.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Returns the rank of this process or thread in the world.
    pub fn world_rank(&self) -> usize {
        self.ranks[self.index]
    }

    /// Returns the number of ranks in the group.
    pub fn size(&self) -> usize {
        self.ranks.len()
    }

    /// Returns the group in `groups` that contains this rank, with the index of that group in `groups`. The returned
    /// group has the name `name`.
    pub fn part(&self, name: &str, groups: &[Vec<usize>]) -> Option<(usize, Group)> {
        let own = self.world_rank();
        groups.iter().enumerate().find_map(|(number, ranks)| {
            let index = ranks.iter().position(|rank| *rank == own)?;
            Some((number, Group::new(name, ranks.clone(), index)))
        })
    }
}

impl fmt::Display for Group {
    /// Writes the name and the world ranks: `tensor [2, 3]`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} [{}]", self.name, list_ranks(&self.ranks))
    }
}

/// Collectives and point-to-point messages between the ranks of one group.
///
/// All ranks of a group must issue the same collectives in the same order. The arguments are compared between ranks. If
/// they differ, the collective fails with [`CommError::Mismatch`]. Messages ([`send`](Self::send),
/// [`receive`](Self::receive)) have a separate order for each pair of ranks, which is independent of the order of the
/// collectives.
///
/// Methods whose names start with `start_` return immediately. The other methods wait for the result. Root and peer
/// ranks are indices in the group. Counts are numbers of elements. Every method returns [`CommError::InvalidCall`] if
/// its arguments are invalid. In this case nothing is sent. [`CommError`] lists the errors that can occur while a rank
/// waits.
///
/// An engine implements [`group`](Self::group), [`start`](Self::start) and [`split`](Self::split). The default
/// implementations of the other methods call `start`. A wrapper around another communicator also forwards
/// [`pool`](Self::pool) and [`begin_step`](Self::begin_step). It forwards [`start_all`](Self::start_all) if it does not
/// change individual calls.
///
/// ```
/// use burn_megatron_comm::{CommError, DType, ReduceOp, World};
///
/// let results = World::threads(2)?.run(|rank| {
///     let (world, own) = (rank.communicator(), rank.rank() as f32);
///     // Each rank gets its half of the sum.
///     let half = world.reduce_scatter(vec![own; 4].into(), ReduceOp::Sum)?;
///     // The ranks exchange messages.
///     let peer = 1 - rank.rank();
///     world.send(vec![own].into(), peer)?;
///     let received = world.receive(peer, DType::F32, 1)?;
///     Ok::<_, CommError>((half.into_vec::<f32>(), received.into_vec::<f32>()))
/// })?;
/// assert_eq!(results[0], (vec![1.0, 1.0], vec![1.0]));
/// # Ok::<(), burn_megatron_comm::WorldError>(())
/// ```
pub trait Communicator: Send + Sync + fmt::Debug + 'static {
    /// Returns the group of ranks that this communicator connects.
    fn group(&self) -> &Group;

    /// Starts a collective, a send or a receive. Returns without waiting for other ranks.
    fn start(&self, call: Call, input: Buffer) -> Result<Pending, CommError>;

    /// Splits the group and returns the communicator of the part that contains this rank.
    ///
    /// `groups` contains the world ranks of each part. Each rank of this group must be in exactly one part. The order
    /// of the ranks in a part is their order in the new group.
    ///
    /// Collective: call on all ranks of the group with the same arguments. The arguments are compared between ranks.
    ///
    /// # Errors
    /// [`CommError::InvalidCall`] if `groups` is not a partition of this group's ranks.
    fn split(&self, name: &str, groups: &[Vec<usize>]) -> Result<Arc<dyn Communicator>, CommError>;

    /// Starts several operations at once, which an engine may fuse into one launch. Returns one handle per operation,
    /// in the order of `calls`.
    ///
    /// The result is the same as starting the operations one after the other, but all of them are checked before the
    /// first is sent. All ranks must pass the same operations in the same order.
    ///
    /// # Errors
    /// [`CommError::InvalidCall`] for the first invalid operation. In this case nothing is sent. Otherwise, returns the
    /// error of the first operation that fails to start.
    fn start_all(&self, calls: Vec<(Call, Buffer)>) -> Result<Vec<Pending>, CommError> {
        for (call, input) in &calls {
            call.check(self.group(), input)?;
        }
        let calls = calls.into_iter();
        calls.map(|(call, input)| self.start(call, input)).collect()
    }

    /// Returns the buffer pool that allocates the results, or `None` if the engine has no pool. If the caller [gives a
    /// result back](BufferPool::give) to the pool, the next operation needs no allocation.
    fn pool(&self) -> Option<&Arc<BufferPool>> {
        None
    }

    /// Records that a training step begins on this rank. A trainer counts steps from 1. The step number is used by call
    /// logs, failure reports and fault injection. Wrappers must forward this method.
    fn begin_step(&self, _step: u64) {}

    /// Returns the interface for tensors in device memory, or `None` if tensors must be copied through host memory. A
    /// wrapper must not forward this method if it changes the operations.
    fn on_device(&self) -> Option<&dyn DeviceCommunicator> {
        None
    }

    /// Returns the index of this rank in the group.
    fn rank(&self) -> usize {
        self.group().index()
    }

    /// Returns the number of ranks in the group.
    fn size(&self) -> usize {
        self.group().size()
    }

    /// Starts an [`all_reduce`](Self::all_reduce) and returns its handle.
    fn start_all_reduce(&self, input: Buffer, op: ReduceOp) -> Result<Pending, CommError> {
        self.start(Call::AllReduce(op), input)
    }

    /// Reduces the buffers of all ranks element by element: `[n] -> [n]`.
    fn all_reduce(&self, input: Buffer, op: ReduceOp) -> Result<Buffer, CommError> {
        self.start_all_reduce(input, op)?.wait()
    }

    /// Starts an [`all_gather`](Self::all_gather) and returns its handle.
    fn start_all_gather(&self, input: Buffer) -> Result<Pending, CommError> {
        self.start(Call::AllGather, input)
    }

    /// Concatenates the buffers of all ranks in group order: `[n] -> [size * n]`.
    fn all_gather(&self, input: Buffer) -> Result<Buffer, CommError> {
        self.start_all_gather(input)?.wait()
    }

    /// Starts a [`reduce_scatter`](Self::reduce_scatter) and returns its handle.
    fn start_reduce_scatter(&self, input: Buffer, op: ReduceOp) -> Result<Pending, CommError> {
        self.start(Call::ReduceScatter(op), input)
    }

    /// Reduces the buffers of all ranks element by element and returns this rank's chunk: `[size * n] -> [n]`.
    fn reduce_scatter(&self, input: Buffer, op: ReduceOp) -> Result<Buffer, CommError> {
        self.start_reduce_scatter(input, op)?.wait()
    }

    /// Starts a [`broadcast`](Self::broadcast) and returns its handle.
    fn start_broadcast(&self, input: Buffer, root: usize) -> Result<Pending, CommError> {
        self.start(Call::Broadcast { root }, input)
    }

    /// Broadcasts the buffer of the root: `[n] -> [n]`. Other ranks pass a buffer of the same length and type, whose
    /// contents are ignored.
    fn broadcast(&self, input: Buffer, root: usize) -> Result<Buffer, CommError> {
        self.start_broadcast(input, root)?.wait()
    }

    /// Starts an [`all_to_all`](Self::all_to_all) and returns its handle.
    fn start_all_to_all(
        &self,
        input: Buffer,
        send: Vec<usize>,
        receive: Vec<usize>,
    ) -> Result<Pending, CommError> {
        self.start(Call::AllToAll { send, receive }, input)
    }

    /// Sends `send[i]` elements to rank `i` and receives `receive[i]` elements from rank `i`:
    /// `[sum(send)] -> [sum(receive)]`. Both buffers are in group order.
    fn all_to_all(
        &self,
        input: Buffer,
        send: Vec<usize>,
        receive: Vec<usize>,
    ) -> Result<Buffer, CommError> {
        self.start_all_to_all(input, send, receive)?.wait()
    }

    /// Starts a [`send`](Self::send) and returns its handle.
    fn start_send(&self, input: Buffer, to: usize) -> Result<Pending, CommError> {
        self.start(Call::Send { to }, input)
    }

    /// Sends a buffer to one rank.
    fn send(&self, input: Buffer, to: usize) -> Result<(), CommError> {
        self.start_send(input, to)?.wait().map(drop)
    }

    /// Starts a [`receive`](Self::receive) and returns its handle. Messages are matched to receives in the order in
    /// which the receives are started.
    fn start_receive(&self, from: usize, dtype: DType, len: usize) -> Result<Pending, CommError> {
        self.start(Call::Receive { from, dtype, len }, Buffer::empty(dtype))
    }

    /// Receives the next buffer that the rank `from` sends to this rank. The buffer must have the type `dtype` and the
    /// length `len`.
    fn receive(&self, from: usize, dtype: DType, len: usize) -> Result<Buffer, CommError> {
        self.start_receive(from, dtype, len)?.wait()
    }

    /// Starts a [`barrier`](Self::barrier) and returns its handle.
    fn start_barrier(&self) -> Result<Pending, CommError> {
        self.start(Call::Barrier, Buffer::empty(DType::U8))
    }

    /// Blocks until every rank of the group has called this method.
    fn barrier(&self) -> Result<(), CommError> {
        self.start_barrier()?.wait().map(drop)
    }
}

impl dyn Communicator + '_ {
    /// Reduces one scalar per rank. Returns the same result on all ranks.
    pub fn all_reduce_scalar<T: Element>(&self, value: T, op: ReduceOp) -> Result<T, CommError> {
        Ok(self.all_reduce(T::into_buffer(vec![value]), op)?.into_vec()[0])
    }

    /// Broadcasts a scalar from the root. The values of the other ranks are ignored.
    pub fn broadcast_scalar<T: Element>(&self, value: T, root: usize) -> Result<T, CommError> {
        Ok(self
            .broadcast(T::into_buffer(vec![value]), root)?
            .into_vec()[0])
    }
}
