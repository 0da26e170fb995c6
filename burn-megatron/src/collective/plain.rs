//! Collectives on plain tensors, outside of autodiff: started now, waited for later.

use burn::tensor::Tensor;

use super::Comm;
use super::flight::{Flight, launch};
use super::host::invalid;
use crate::comm::{Call, ReduceOp};

/// What a collective does with the tensor of one rank.
#[derive(Clone, Debug, PartialEq)]
pub enum Move {
    /// Nothing; no communication.
    Keep,
    /// Reduction over all ranks; the shape stays.
    AllReduce(ReduceOp),
    /// This rank's part of `dim`; no communication.
    Split {
        /// The dimension to cut into as many parts as there are ranks.
        dim: usize,
    },
    /// The parts of all ranks along `dim`.
    Gather {
        /// The dimension along which the parts are put side by side.
        dim: usize,
    },
    /// The sum over all ranks, of which each keeps its part of `dim`.
    ReduceScatter {
        /// The dimension to cut into as many parts as there are ranks.
        dim: usize,
    },
    /// Rows (dim 0) change ranks.
    AllToAll {
        /// How many rows go to each rank.
        send: Vec<usize>,
        /// How many rows come from each rank.
        receive: Vec<usize>,
    },
}

/// A collective under way.
#[must_use = "a collective that is not waited for has no result"]
pub struct PendingTensor<const D: usize> {
    state: State<D>,
}

enum State<const D: usize> {
    Ready(Box<Tensor<D>>),
    Flying {
        flight: Flight,
        parts: usize,
        shape: [usize; D],
        dim: usize,
    },
}

impl<const D: usize> PendingTensor<D> {
    /// A result that is there already.
    pub fn ready(tensor: Tensor<D>) -> Self {
        Self {
            state: State::Ready(Box::new(tensor)),
        }
    }

    /// The result; waits for the other ranks.
    ///
    /// Unwinds with [`raise`](crate::comm::raise) when the collective fails.
    pub fn wait(self) -> Tensor<D> {
        match self.state {
            State::Ready(tensor) => *tensor,
            State::Flying {
                flight,
                parts,
                shape,
                dim,
            } => {
                let mut stacked = shape;
                stacked[0] *= parts;
                let stacked = flight.wait(stacked);
                match dim {
                    0 => stacked,
                    // The parts follow each other; they belong side by side along `dim`.
                    _ => Tensor::cat(stacked.chunk(parts, 0), dim),
                }
            }
        }
    }
}

/// Starts `way` on `x`, which must be a plain tensor.
///
/// Unwinds with [`raise`](crate::comm::raise) where the shape does not fit the group.
pub fn start<const D: usize>(x: Tensor<D>, way: &Move, comm: &Comm) -> PendingTensor<D> {
    check(&x, way, comm);
    if comm.size() == 1 {
        return PendingTensor::ready(x);
    }
    match way {
        Move::Keep => PendingTensor::ready(x),
        Move::AllReduce(op) => start_all_reduce(x, *op, comm),
        Move::Split { dim } => {
            let part = part_of(&x, *dim, comm);
            PendingTensor::ready(x.narrow(*dim, comm.rank() * part, part))
        }
        Move::Gather { dim } => start_all_gather(x, *dim, comm),
        Move::ReduceScatter { dim } => start_reduce_scatter(x, *dim, comm),
        Move::AllToAll { send, receive } => start_all_to_all(x, send, receive, comm),
    }
}

/// Starts the reduction of `x` over the ranks of `comm`.
pub fn start_all_reduce<const D: usize>(
    x: Tensor<D>,
    op: ReduceOp,
    comm: &Comm,
) -> PendingTensor<D> {
    let shape = x.dims();
    flying(launch(x, Call::AllReduce(op), comm), 1, shape, 0)
}

/// Starts gathering the parts of all ranks along `dim`.
pub fn start_all_gather<const D: usize>(x: Tensor<D>, dim: usize, comm: &Comm) -> PendingTensor<D> {
    check_dim(&x, dim, comm);
    let shape = x.dims();
    flying(launch(x, Call::AllGather, comm), comm.size(), shape, dim)
}

/// Starts summing `x` over the ranks; each keeps its part of `dim`.
pub fn start_reduce_scatter<const D: usize>(
    x: Tensor<D>,
    dim: usize,
    comm: &Comm,
) -> PendingTensor<D> {
    let part = part_of(&x, dim, comm);
    let mut shape = x.dims();
    shape[dim] = part;
    // Each rank's part must be contiguous.
    let x = if dim == 0 {
        x
    } else {
        Tensor::cat(x.chunk(comm.size(), dim), 0)
    };
    let call = Call::ReduceScatter(ReduceOp::Sum);
    flying(launch(x, call, comm), 1, shape, 0)
}

/// What a rank can check alone; it holds for a group of one too, where nothing is sent.
///
/// Unwinds with [`raise`](crate::comm::raise) where the shape does not fit the group.
pub(super) fn check<const D: usize>(x: &Tensor<D>, way: &Move, comm: &Comm) {
    match way {
        Move::Keep | Move::AllReduce(_) => {}
        Move::Gather { dim } => check_dim(x, *dim, comm),
        Move::Split { dim } | Move::ReduceScatter { dim } => {
            part_of(x, *dim, comm);
        }
        Move::AllToAll { send, receive } => check_counts(x, send, receive, comm),
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
    flying(launch(x, call, comm), 1, shape, 0)
}

pub(super) fn flying<const D: usize>(
    flight: Flight,
    parts: usize,
    shape: [usize; D],
    dim: usize,
) -> PendingTensor<D> {
    PendingTensor {
        state: State::Flying {
            flight,
            parts,
            shape,
            dim,
        },
    }
}

/// The size of one rank's part of `dim`.
pub(super) fn part_of<const D: usize>(x: &Tensor<D>, dim: usize, comm: &Comm) -> usize {
    check_dim(x, dim, comm);
    let (shape, size) = (x.dims(), comm.size());
    if !shape[dim].is_multiple_of(size) {
        invalid(format!(
            "dim {dim} of a tensor {shape:?} cannot be split over the {size} ranks of {}; \
             a multiple of {size} can",
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
