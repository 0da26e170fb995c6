//! Differentiable collectives. Each collective has a backward.
//!
//! In the table, the column *forward* is the operation on the input, and the column *backward* is the operation on the
//! gradient of the output. In a group of one rank, each collective is the identity, and autodiff records nothing.
//!
//! | function | forward | backward | used by |
//! |---|---|---|---|
//! | [`copy`] | identity | all-reduce | input of a column-parallel layer |
//! | [`reduce`] | all-reduce | identity | output of a row-parallel layer |
//! | [`split`] | this rank's part along `dim` | all-gather | replicated input, if each rank uses only its part |
//! | [`gather`] | all-gather along `dim` | this rank's part | output that every rank needs in full |
//! | [`scatter_sequence`] | this rank's part along `dim` | all-gather | start of the sequence-parallel region |
//! | [`gather_sequence`] | all-gather along `dim` | reduce-scatter | before a column-parallel layer |
//! | [`reduce_scatter_sequence`] | reduce-scatter along `dim` | all-gather | after a row-parallel layer |
//! | [`all_to_all`] | all-to-all of rows | reverse all-to-all | experts, context parallelism |
//! | [`gather_rows`] | all-gather of uneven rows | reduce-scatter | experts |
//! | [`reduce_scatter_rows`] | reduce-scatter of uneven rows | all-gather | experts |
//! | [`all_reduce`] | all-reduce | all-reduce | sums that contribute to the loss on every rank |
//!
//! The first four functions are from Shoeybi et al. 2019 (arXiv:1909.08053). The next three functions are from
//! Korthikanti et al. 2022 (arXiv:2205.05198).
//!
//! The functions whose names begin with `start_` are asynchronous: they take plain tensors, without autodiff, and
//! return a handle. The functions whose names end with `coalesced` take several flat tensors and start one collective
//! per tensor in a single call. [`start_all_gather_packed_coalesced`] gathers encoded FP8 values, which are packed into
//! `u32` elements.
//!
//! A collective inside a forward or backward cannot return an error. If it fails, it panics (see
//! [`raise`](crate::comm::raise)), and [`World::run`](crate::comm::World::run) returns the error.
//!
//! ```
//! use burn::tensor::{Device, Tensor};
//! use burn_megatron::collective;
//! use burn_megatron::prelude::*;
//!
//! let layout = ParallelConfig::new().with_tensor(2);
//! let results = World::threads(2)?.run(|rank| {
//!     let groups = ParallelContext::new(&layout, &rank)?;
//!     let x = Tensor::<1>::full([2], rank.rank() as f32 + 1.0, &Device::flex());
//!     let sum = collective::reduce(x.clone(), groups.tensor());
//!     let all = collective::gather(x, 0, groups.tensor());
//!     Ok::<_, AnyError>((sum.max().into_scalar::<f32>(), all.dims()))
//! })?;
//! assert_eq!(results, [(3.0, [4]); 2]);
//! # Ok::<(), AnyError>(())
//! ```

use burn::tensor::Tensor;
use burn_megatron_kernels::apply;

use crate::comm::ReduceOp;

mod async_ops;
mod coalesced;
mod dispatch;
mod function;
mod group;
mod host;
pub(crate) mod messages;
mod packed;
mod recorded;
mod reduce_in_f32;
mod ring;
#[cfg(test)]
mod tests;
mod uneven;

use CollectiveOp::{AllReduce, AllToAll, Gather, Identity, ReduceScatter, Split};
pub(crate) use async_ops::try_all_gather;
pub use async_ops::{
    CollectiveOp, PendingTensor, start, start_all_gather, start_all_reduce, start_reduce_scatter,
};
pub use coalesced::{
    start_all_gather_coalesced, start_all_reduce_coalesced, start_reduce_scatter_coalesced,
};
use function::CollectiveFunction;
pub use group::Comm;
pub(crate) use group::first_on_all;
pub(crate) use host::buffer_dtype;
pub use host::{from_buffer, invalid, or_raise, to_buffer, to_device, to_f64, to_host, wire_dtype};
pub(crate) use packed::start_all_to_all_packed;
pub use packed::{PendingPacked, start_all_gather_packed_coalesced};
pub use recorded::{ExchangeKind, ExchangeNote};
pub use reduce_in_f32::start_reduce_scatter_in_f32;
pub(crate) use ring::{RingAllGather, start_ring_shift};
pub use uneven::{gather_rows, reduce_scatter_rows};

/// Returns `x` unchanged. The backward sums the gradients of all ranks (all-reduce).
pub fn copy<const D: usize>(x: Tensor<D>, comm: &Comm) -> Tensor<D> {
    apply_collective(x, comm, Identity, AllReduce(ReduceOp::Sum))
}

/// Returns the sum of `x` over all ranks (all-reduce). The backward returns the gradient unchanged, because the
/// gradient is the same on every rank.
pub fn reduce<const D: usize>(x: Tensor<D>, comm: &Comm) -> Tensor<D> {
    apply_collective(x, comm, AllReduce(ReduceOp::Sum), Identity)
}

/// Splits a tensor that is the same on every rank, and returns this rank's part along `dim`.
///
/// `x.dims()[dim]` must be a multiple of the number of ranks in the group.
pub fn split<const D: usize>(x: Tensor<D>, dim: usize, comm: &Comm) -> Tensor<D> {
    apply_collective(x, comm, Split { dim }, Gather { dim })
}

/// Returns the parts of all ranks concatenated along `dim`, in rank order.
///
/// All ranks must compute the same values from the result, so that its gradient is equal on all ranks. The backward
/// returns this rank's part of this gradient. If the ranks compute different values, use [`gather_sequence`].
pub fn gather<const D: usize>(x: Tensor<D>, dim: usize, comm: &Comm) -> Tensor<D> {
    apply_collective(x, comm, Gather { dim }, Split { dim })
}

/// Enters the sequence-parallel region: returns this rank's part of the sequence, which is along `dim`.
pub fn scatter_sequence<const D: usize>(x: Tensor<D>, dim: usize, comm: &Comm) -> Tensor<D> {
    split(x, dim, comm)
}

/// Leaves the sequence-parallel region: gathers the sequence along `dim`, for layers whose weights are split over the
/// ranks.
///
/// The gradients of the ranks are partial sums, so the backward sums them and keeps this rank's part of the
/// sequence.
pub fn gather_sequence<const D: usize>(x: Tensor<D>, dim: usize, comm: &Comm) -> Tensor<D> {
    apply_collective(x, comm, Gather { dim }, ReduceScatter { dim })
}

/// Enters the sequence-parallel region from partial sums: sums `x` over the ranks and returns this rank's part along
/// `dim` (reduce-scatter).
pub fn reduce_scatter_sequence<const D: usize>(x: Tensor<D>, dim: usize, comm: &Comm) -> Tensor<D> {
    apply_collective(x, comm, ReduceScatter { dim }, Gather { dim })
}

/// Sends `send[r]` rows (along dim 0) to rank `r` and receives `receive[r]` rows from it.
///
/// The output contains the received rows in rank order. The numbers of sent and received rows must match on all ranks.
pub fn all_to_all<const D: usize>(
    x: Tensor<D>,
    send: Vec<usize>,
    receive: Vec<usize>,
    comm: &Comm,
) -> Tensor<D> {
    let back = AllToAll {
        send: receive.clone(),
        receive: send.clone(),
    };
    apply_collective(x, comm, AllToAll { send, receive }, back)
}

/// Returns the sum of `x` over all ranks. The backward also sums the gradients of all ranks, because the ranks may
/// compute different values from the sum.
///
/// Use [`reduce`] if every rank computes the same values from the sum.
pub fn all_reduce<const D: usize>(x: Tensor<D>, comm: &Comm) -> Tensor<D> {
    let sum = AllReduce(ReduceOp::Sum);
    apply_collective(x, comm, sum.clone(), sum)
}

fn apply_collective<const D: usize>(
    x: Tensor<D>,
    comm: &Comm,
    forward: CollectiveOp,
    backward: CollectiveOp,
) -> Tensor<D> {
    if comm.size() == 1 {
        async_ops::check(&x, &forward, comm);
        return x;
    }
    apply(
        vec![x.into_dispatch()],
        CollectiveFunction::<D> {
            comm: comm.clone(),
            forward,
            backward,
        },
    )
}
