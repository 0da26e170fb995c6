//! Differentiable collectives: each forward with the backward that belongs to it.
//!
//! In the table, `y` is the output on this rank and the backward column is what happens to its
//! gradient. A group of one rank makes each of them the identity, with nothing recorded.
//!
//! | function | forward | backward | used by |
//! |---|---|---|---|
//! | [`copy`] | identity | all-reduce | input of a column-parallel layer |
//! | [`reduce`] | all-reduce | identity | output of a row-parallel layer |
//! | [`split`] | own part of `dim` | all-gather | input that each rank takes a part of |
//! | [`gather`] | all-gather along `dim` | own part | output that every rank needs whole |
//! | [`scatter_sequence`] | own part of `dim` | all-gather | entry of the sequence-parallel region |
//! | [`gather_sequence`] | all-gather along `dim` | reduce-scatter | before a column-parallel layer |
//! | [`reduce_scatter_sequence`] | reduce-scatter along `dim` | all-gather | after a row-parallel layer |
//! | [`all_to_all`] | all-to-all of rows | all-to-all back | experts, context parallelism |
//! | [`all_reduce`] | all-reduce | all-reduce | sums that every rank uses as a part of its own loss |
//!
//! The first four are Shoeybi et al. 2019 (arXiv:1909.08053), the next three Korthikanti et al.
//! 2022 (arXiv:2205.05198).
//!
//! Outside of autodiff, the `start_` functions take plain tensors and give a handle; those on several
//! flat tensors start them as one call, and [`start_all_gathers_of_words`] moves packed codes.
//!
//! A collective that fails inside forward or backward cannot return an error there: it unwinds with
//! [`raise`](crate::comm::raise), and [`World::run`](crate::comm::World::run) returns it.

use std::sync::Arc;

use burn::tensor::Tensor;
use burn_megatron_kernels::apply;

use crate::comm::{Communicator, ReduceOp};

mod flat;
mod flight;
mod function;
mod host;
mod plain;
#[cfg(test)]
mod tests;
mod wide;
mod words;

pub use flat::{start_all_gathers, start_all_reduces, start_reduce_scatters};
use function::Conjugate;
pub use host::{from_buffer, to_buffer};
pub use plain::{
    Move, PendingTensor, start, start_all_gather, start_all_reduce, start_reduce_scatter,
};
pub use wide::{PendingWide, start_reduce_scatter_wide};
pub use words::{PendingWords, start_all_gathers_of_words};

/// A group of ranks, as the layers hold it.
pub type Comm = Arc<dyn Communicator>;

/// Identity; the gradients of all ranks are summed in the backward.
pub fn copy<const D: usize>(x: Tensor<D>, comm: &Comm) -> Tensor<D> {
    conjugate(x, comm, Move::Keep, Move::AllReduce(ReduceOp::Sum))
}

/// The sum over all ranks; the gradient passes unchanged, as it is the same on every rank.
pub fn reduce<const D: usize>(x: Tensor<D>, comm: &Comm) -> Tensor<D> {
    conjugate(x, comm, Move::AllReduce(ReduceOp::Sum), Move::Keep)
}

/// This rank's part of `dim`, of a tensor that every rank has whole.
///
/// `x.dims()[dim]` must be a multiple of the size of the group.
pub fn split<const D: usize>(x: Tensor<D>, dim: usize, comm: &Comm) -> Tensor<D> {
    conjugate(x, comm, Move::Split { dim }, Move::Gather { dim })
}

/// The parts of all ranks side by side along `dim`, in rank order.
///
/// What follows must be the same on every rank: the backward takes this rank's part of a gradient
/// that it takes for equal everywhere. See [`gather_sequence`] for the other case.
pub fn gather<const D: usize>(x: Tensor<D>, dim: usize, comm: &Comm) -> Tensor<D> {
    conjugate(x, comm, Move::Gather { dim }, Move::Split { dim })
}

/// Enters the sequence-parallel region: this rank's part of the sequence, which lies along `dim`.
pub fn scatter_sequence<const D: usize>(x: Tensor<D>, dim: usize, comm: &Comm) -> Tensor<D> {
    split(x, dim, comm)
}

/// Leaves the sequence-parallel region towards layers that differ from rank to rank.
///
/// The gradients of the ranks are parts of a sum, so the backward adds them up and keeps this
/// rank's part of the sequence.
pub fn gather_sequence<const D: usize>(x: Tensor<D>, dim: usize, comm: &Comm) -> Tensor<D> {
    conjugate(x, comm, Move::Gather { dim }, Move::ReduceScatter { dim })
}

/// Enters the sequence-parallel region with partial sums: adds them up and keeps this rank's part.
pub fn reduce_scatter_sequence<const D: usize>(x: Tensor<D>, dim: usize, comm: &Comm) -> Tensor<D> {
    conjugate(x, comm, Move::ReduceScatter { dim }, Move::Gather { dim })
}

/// Sends `send[r]` rows (along dim 0) to rank `r` and receives `receive[r]` rows from it.
///
/// The output has the received rows in rank order. The counts of all ranks must agree.
pub fn all_to_all<const D: usize>(
    x: Tensor<D>,
    send: Vec<usize>,
    receive: Vec<usize>,
    comm: &Comm,
) -> Tensor<D> {
    let back = Move::AllToAll {
        send: receive.clone(),
        receive: send.clone(),
    };
    conjugate(x, comm, Move::AllToAll { send, receive }, back)
}

/// The sum over all ranks, of which each makes another use: the gradients are summed too.
///
/// Use [`reduce`] where every rank goes on with the same computation.
pub fn all_reduce<const D: usize>(x: Tensor<D>, comm: &Comm) -> Tensor<D> {
    let sum = Move::AllReduce(ReduceOp::Sum);
    conjugate(x, comm, sum.clone(), sum)
}

fn conjugate<const D: usize>(
    x: Tensor<D>,
    comm: &Comm,
    forward: Move,
    backward: Move,
) -> Tensor<D> {
    if comm.size() == 1 {
        plain::check(&x, &forward, comm);
        return x;
    }
    apply(
        vec![x.into_dispatch()],
        Conjugate::<D> {
            comm: comm.clone(),
            forward,
            backward,
        },
    )
}
