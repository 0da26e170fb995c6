//! Tensors that travel around the ranks of a group, from neighbour to neighbour.

use std::collections::VecDeque;

use burn::tensor::Tensor;

use super::async_ops::{CollectiveOp, PendingTensor, start};
use super::group::Comm;

/// Starts to send `x` to the next rank and to receive that of the previous one, which must have the same shape.
///
/// It is an all-to-all with one peer each way, so that a shift is compared and recorded like any collective.
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

/// The tensors of all ranks, as many of each, and of the same shapes; while one is computed with, the next ones are under
/// way. A rank sends those of all ranks but the next one.
pub struct RingAllGather<const D: usize> {
    comm: Comm,
    own: Vec<Tensor<D>>,
    /// In the order of their arrival.
    in_flight: VecDeque<PendingTensor<D>>,
}

impl<const D: usize> RingAllGather<D> {
    /// Starts to send the tensors of this rank to the next one.
    pub fn start(own: Vec<Tensor<D>>, comm: &Comm) -> Self {
        let sent = own.iter().filter(|_| comm.size() > 1);
        Self {
            in_flight: sent.map(|x| start_ring_shift(x.clone(), comm)).collect(),
            comm: comm.clone(),
            own,
        }
    }

    /// Calls `compute` with each tensor, the index of its rank, and its own among those of that rank; the own ones are
    /// first.
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
