//! Coalesced collectives: a single call starts a collective on each of several flat tensors.

use burn::tensor::Tensor;

use super::async_ops::{CollectiveOp, PendingTensor, check, pending_call};
use super::dispatch::launch_all;
use super::group::Comm;
use crate::comm::{Call, ReduceOp};

/// Starts a reduce-scatter of each tensor in `xs`. Each tensor is summed over the ranks, and each rank keeps its part
/// of the sum. The shape of each tensor changes from `[n]` to `[n / ranks]`.
///
/// A single call starts all collectives ([`start_all`](crate::comm::Communicator::start_all)). The handles are returned
/// in the order of `xs`. If the length of a tensor is not a multiple of the number of ranks, the function sends nothing
/// and panics (see [`raise`](crate::comm::raise)).
pub fn start_reduce_scatter_coalesced(xs: Vec<Tensor<1>>, comm: &Comm) -> Vec<PendingTensor<1>> {
    let (op, call) = (
        CollectiveOp::ReduceScatter { dim: 0 },
        Call::ReduceScatter(ReduceOp::Sum),
    );
    for x in &xs {
        check(x, &op, comm);
    }
    start_each(xs, &call, comm)
}

/// Starts an all-reduce of each tensor in `xs`. The shape `[n]` stays the same. See [`start_reduce_scatter_coalesced`]
/// for the order of the handles.
pub fn start_all_reduce_coalesced(
    xs: Vec<Tensor<1>>,
    op: ReduceOp,
    comm: &Comm,
) -> Vec<PendingTensor<1>> {
    start_each(xs, &Call::AllReduce(op), comm)
}

/// Starts an all-gather of each tensor in `xs`. The shape of each tensor changes from `[n]` to `[ranks * n]`. See
/// [`start_reduce_scatter_coalesced`] for the order of the handles.
pub fn start_all_gather_coalesced(xs: Vec<Tensor<1>>, comm: &Comm) -> Vec<PendingTensor<1>> {
    start_each(xs, &Call::AllGather, comm)
}

fn start_each(xs: Vec<Tensor<1>>, call: &Call, comm: &Comm) -> Vec<PendingTensor<1>> {
    let ranks = comm.size();
    if ranks == 1 {
        return xs.into_iter().map(PendingTensor::ready).collect();
    }
    // The length of a result is `parts` times the input length divided by `cut`.
    let (cut, parts) = match call {
        Call::ReduceScatter(_) => (ranks, 1),
        Call::AllGather => (1, ranks),
        _ => (1, 1),
    };
    let lengths: Vec<_> = xs.iter().map(|x| x.dims()[0] / cut).collect();
    let started = launch_all(xs, call, comm).into_iter();
    started
        .zip(lengths)
        .map(|(call, len)| pending_call(call, parts, [len], 0))
        .collect()
}
