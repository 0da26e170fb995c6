//! Asynchronous collectives on plain tensors, without autodiff. Each collective returns a handle to wait on.

use burn::tensor::Tensor;

use super::dispatch::{InFlightTensorCall, launch, try_launch};
use super::group::Comm;
use super::host::{invalid, or_raise};
use super::reduce_in_f32::sum_received;
use crate::comm::{Call, CommError, ReduceOp};

/// A collective operation on the tensor of each rank.
#[derive(Clone, Debug, PartialEq)]
pub enum CollectiveOp {
    /// The identity, without communication.
    Identity,
    /// All-reduce: reduces the tensors of all ranks. The shape stays the same.
    AllReduce(ReduceOp),
    /// Returns this rank's part of the tensor along `dim`, without communication.
    Split {
        /// The dimension that is split into one part per rank.
        dim: usize,
    },
    /// All-gather: concatenates the parts of all ranks along `dim`.
    Gather {
        /// The dimension along which the parts are concatenated.
        dim: usize,
    },
    /// Reduce-scatter: sums the tensors of all ranks. Each rank keeps its part of the sum along `dim`.
    ReduceScatter {
        /// The dimension that is split into one part per rank.
        dim: usize,
    },
    /// All-to-all of rows (dim 0).
    AllToAll {
        /// The number of rows that this rank sends to each rank.
        send: Vec<usize>,
        /// The number of rows that this rank receives from each rank.
        receive: Vec<usize>,
    },
}

/// The handle of an asynchronous collective. The result of the collective is a tensor.
#[must_use = "a collective that is not waited for has no result"]
pub struct PendingTensor<const D: usize> {
    state: PendingTensorState<D>,
}

enum PendingTensorState<const D: usize> {
    Ready(Box<Tensor<D>>),
    InFlight {
        call: InFlightTensorCall,
        parts: usize,
        shape: [usize; D],
        dim: usize,
    },
    /// The parts of all ranks, which are summed in `f32`.
    Sum {
        call: InFlightTensorCall,
        shape: [usize; D],
        comm: Comm,
    },
}

impl<const D: usize> PendingTensor<D> {
    /// Creates a handle that already has its result.
    pub fn ready(tensor: Tensor<D>) -> Self {
        Self {
            state: PendingTensorState::Ready(Box::new(tensor)),
        }
    }

    /// Waits until the collective has finished, and returns the result.
    ///
    /// Panics (see [`raise`](crate::comm::raise)) if the collective fails.
    pub fn wait(self) -> Tensor<D> {
        or_raise(self.try_wait())
    }

    /// Waits like [`wait`](Self::wait), but returns an error instead of panicking.
    pub(crate) fn try_wait(self) -> Result<Tensor<D>, CommError> {
        Ok(match self.state {
            PendingTensorState::Ready(tensor) => *tensor,
            PendingTensorState::Sum { call, shape, comm } => sum_received(call, shape, &comm)?,
            PendingTensorState::InFlight {
                call,
                parts,
                shape,
                dim,
            } => {
                let mut stacked = shape;
                stacked[0] *= parts;
                let stacked = call.try_wait(stacked)?;
                match dim {
                    0 => stacked,
                    // The parts are stacked along dim 0 and must be concatenated along `dim`.
                    _ => Tensor::cat(stacked.chunk(parts, 0), dim),
                }
            }
        })
    }
}

/// Starts the collective `op` on `x`, which must be a plain tensor (without autodiff).
///
/// Panics (see [`raise`](crate::comm::raise)) if the shape is invalid for the group.
pub fn start<const D: usize>(x: Tensor<D>, op: &CollectiveOp, comm: &Comm) -> PendingTensor<D> {
    check(&x, op, comm);
    if comm.size() == 1 {
        return PendingTensor::ready(x);
    }
    match op {
        CollectiveOp::Identity => PendingTensor::ready(x),
        CollectiveOp::AllReduce(reduction) => start_all_reduce(x, *reduction, comm),
        CollectiveOp::Split { dim } => {
            let part = part_len(&x, *dim, comm);
            PendingTensor::ready(x.narrow(*dim, comm.rank() * part, part))
        }
        CollectiveOp::Gather { dim } => start_all_gather(x, *dim, comm),
        CollectiveOp::ReduceScatter { dim } => start_reduce_scatter(x, *dim, comm),
        CollectiveOp::AllToAll { send, receive } => start_all_to_all(x, send, receive, comm),
    }
}

/// Starts an all-reduce of `x` over the ranks of `comm`.
pub fn start_all_reduce<const D: usize>(
    x: Tensor<D>,
    op: ReduceOp,
    comm: &Comm,
) -> PendingTensor<D> {
    let shape = x.dims();
    pending_call(launch(x, Call::AllReduce(op), comm), 1, shape, 0)
}

/// Starts an all-gather that concatenates the tensors of all ranks along `dim`.
pub fn start_all_gather<const D: usize>(x: Tensor<D>, dim: usize, comm: &Comm) -> PendingTensor<D> {
    check_dim(&x, dim, comm);
    let shape = x.dims();
    pending_call(launch(x, Call::AllGather, comm), comm.size(), shape, dim)
}

/// Returns the concatenated flat tensors of all ranks.
///
/// # Errors
///
/// [`CommError`] if the collective fails.
pub(crate) fn try_all_gather(x: Tensor<1>, comm: &Comm) -> Result<Tensor<1>, CommError> {
    let length = x.dims()[0] * comm.size();
    match comm.size() {
        1 => Ok(x),
        _ => try_launch(x, Call::AllGather, comm)?.try_wait([length]),
    }
}

/// Starts a reduce-scatter that sums `x` over the ranks. Each rank keeps its part of the sum along `dim`.
pub fn start_reduce_scatter<const D: usize>(
    x: Tensor<D>,
    dim: usize,
    comm: &Comm,
) -> PendingTensor<D> {
    let part = part_len(&x, dim, comm);
    let mut shape = x.dims();
    shape[dim] = part;
    // Each rank's part must be contiguous.
    let x = if dim == 0 {
        x
    } else {
        Tensor::cat(x.chunk(comm.size(), dim), 0)
    };
    let call = Call::ReduceScatter(ReduceOp::Sum);
    pending_call(launch(x, call, comm), 1, shape, 0)
}

/// Checks the shape of `x` and the arguments of `op` on this rank, without communication. The checks also apply to a
/// group of one rank, in which nothing is sent.
///
/// Panics (see [`raise`](crate::comm::raise)) if the shape is invalid for the group.
pub(super) fn check<const D: usize>(x: &Tensor<D>, op: &CollectiveOp, comm: &Comm) {
    match op {
        CollectiveOp::Identity | CollectiveOp::AllReduce(_) => {}
        CollectiveOp::Gather { dim } => check_dim(x, *dim, comm),
        CollectiveOp::Split { dim } | CollectiveOp::ReduceScatter { dim } => {
            part_len(x, *dim, comm);
        }
        CollectiveOp::AllToAll { send, receive } => check_counts(x, send, receive, comm),
    }
}

fn check_counts<const D: usize>(x: &Tensor<D>, send: &[usize], receive: &[usize], comm: &Comm) {
    let (shape, size, group) = (x.dims(), comm.size(), comm.group());
    let rows: usize = send.iter().sum();
    if (send.len(), receive.len()) != (size, size) {
        invalid(format!(
            "all_to_all over {group} sends to {} ranks ({send:?}) and receives from {} \
             ({receive:?}); give one count per rank",
            send.len(),
            receive.len(),
        ));
    }
    if rows != shape[0] {
        invalid(format!(
            "all_to_all over {group} sends {rows} rows ({send:?}) of a tensor {shape:?} that has {}",
            shape[0],
        ));
    }
    let own = comm.rank();
    if send[own] != receive[own] {
        invalid(format!(
            "all_to_all over {group} sends {} rows to itself, but receives {}",
            send[own], receive[own],
        ));
    }
}

fn start_all_to_all<const D: usize>(
    x: Tensor<D>,
    send: &[usize],
    receive: &[usize],
    comm: &Comm,
) -> PendingTensor<D> {
    let mut shape = x.dims();
    let width: usize = shape[1..].iter().product();
    let elements = |rows: &[usize]| rows.iter().map(|n| n * width).collect();
    shape[0] = receive.iter().sum();
    let call = Call::AllToAll {
        send: elements(send),
        receive: elements(receive),
    };
    pending_call(launch(x, call, comm), 1, shape, 0)
}

pub(super) fn pending_call<const D: usize>(
    call: InFlightTensorCall,
    parts: usize,
    shape: [usize; D],
    dim: usize,
) -> PendingTensor<D> {
    PendingTensor {
        state: PendingTensorState::InFlight {
            call,
            parts,
            shape,
            dim,
        },
    }
}

pub(super) fn pending_sum<const D: usize>(
    call: InFlightTensorCall,
    shape: [usize; D],
    comm: &Comm,
) -> PendingTensor<D> {
    let comm = comm.clone();
    PendingTensor {
        state: PendingTensorState::Sum { call, shape, comm },
    }
}

/// Returns the size of one rank's part of `dim`.
pub(super) fn part_len<const D: usize>(x: &Tensor<D>, dim: usize, comm: &Comm) -> usize {
    check_dim(x, dim, comm);
    let (shape, size) = (x.dims(), comm.size());
    if !shape[dim].is_multiple_of(size) {
        invalid(format!(
            "dim {dim} of a tensor {shape:?} cannot be split over the {size} ranks of {}: expected a multiple of \
             {size}",
            comm.group(),
        ));
    }
    shape[dim] / size
}

fn check_dim<const D: usize>(x: &Tensor<D>, dim: usize, comm: &Comm) {
    if dim >= D {
        invalid(format!(
            "a tensor {:?} has no dim {dim} for a collective over {}",
            x.dims(),
            comm.group(),
        ));
    }
}
