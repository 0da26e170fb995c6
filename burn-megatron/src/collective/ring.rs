//! Tensors that are passed around the ranks of a group, from neighbor to neighbor.

use std::collections::VecDeque;

use burn::tensor::Tensor;

use super::async_ops::{CollectiveOp, PendingTensor, start};
use super::group::Comm;

/// Starts to send `x` to the next rank and to receive a tensor from the previous rank. Both tensors must have the same
/// shape.
///
/// The transfer is implemented as an all-to-all in which each rank sends to one rank and receives from one rank. It is
/// therefore checked and recorded like any other collective.
pub fn start_ring_shift<const D: usize>(x: Tensor<D>, comm: &Comm) -> PendingTensor<D> {
    let (rank, size, rows) = (comm.rank(), comm.size(), x.dims()[0]);
    let only = |peer: usize| {
        let mut counts = vec![0; size];
        counts[peer % size] = rows;
        counts
    };
    let op = CollectiveOp::AllToAll {
        send: only(rank + 1),
        receive: only(rank + size - 1),
    };
    start(x, &op, comm)
}

/// A ring all-gather of the tensors of all ranks. All ranks must have the same number of tensors with the same shapes.
/// While a computation uses one tensor, the next tensors are in flight. Each rank forwards the tensors that it
/// receives, so it sends the tensors of all ranks except the tensors of the next rank.
pub struct RingAllGather<const D: usize> {
    comm: Comm,
    own: Vec<Tensor<D>>,
    /// The receives in the order of their arrival.
    in_flight: VecDeque<PendingTensor<D>>,
}

impl<const D: usize> RingAllGather<D> {
    /// Starts the all-gather: begins to send the tensors of this rank to the next rank.
    pub fn start(own: Vec<Tensor<D>>, comm: &Comm) -> Self {
        let sent = own.iter().filter(|_| comm.size() > 1);
        Self {
            in_flight: sent.map(|x| start_ring_shift(x.clone(), comm)).collect(),
            comm: comm.clone(),
            own,
        }
    }

    /// Calls `compute` for each tensor of each rank. The arguments are the tensor, the index of the rank that owns it,
    /// and its index among the tensors of its owner. The tensors of the calling rank come first.
    pub fn each(mut self, mut compute: impl FnMut(Tensor<D>, usize, usize)) {
        let (rank, size) = (self.comm.rank(), self.comm.size());
        let count = self.own.len();
        for (index, own) in self.own.into_iter().enumerate() {
            compute(own, rank, index);
        }
        let mut received = 0;
        while let Some(pending) = self.in_flight.pop_front() {
            let (step, index) = (1 + received / count, received % count);
            received += 1;
            let x = pending.wait();
            if step + 1 < size {
                let next = start_ring_shift(x.clone(), &self.comm);
                self.in_flight.push_back(next);
            }
            compute(x, (rank + size - step) % size, index);
        }
    }
}
