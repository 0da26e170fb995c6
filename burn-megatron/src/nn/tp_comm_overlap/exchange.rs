//! All-gathers and reduce-scatters that are split into chunks. The tensors are not tracked by autodiff.

use std::collections::VecDeque;

use burn::tensor::Tensor;

use super::chunks::TokenChunks;
use crate::collective::{
    Comm, PendingTensor, RingAllGather, start_all_gather, start_reduce_scatter, start_ring_shift,
};
use crate::mesh::TpCommOverlap;

/// An all-gather of the ranks' parts of a sequence, in chunks of rows. The first chunk is sent immediately.
pub(super) enum GatherInChunks {
    Ring(TokenChunks, RingAllGather<2>),
    Bulk {
        comm: Comm,
        chunks: TokenChunks,
        part: Tensor<3>,
        first: PendingTensor<2>,
    },
}

impl GatherInChunks {
    /// Starts to gather the part `[batch, part, width]` of this rank.
    pub fn start(part: Tensor<3>, chunks: TokenChunks, comm: &Comm) -> Self {
        match chunks.method {
            TpCommOverlap::Ring => {
                let own = (0..chunks.splits).map(|index| chunks.own_rows(&part, index));
                Self::Ring(chunks, RingAllGather::start(own.collect(), comm))
            }
            TpCommOverlap::Bulk => Self::Bulk {
                first: start_all_gather(chunks.own_rows(&part, 0), 0, comm),
                comm: comm.clone(),
                chunks,
                part,
            },
        }
    }

    /// Calls `compute` with the index and the [rows](TokenChunks::rows) of each chunk, while the next chunk is
    /// gathered.
    pub fn each(self, mut compute: impl FnMut(usize, Tensor<2>)) {
        match self {
            Self::Ring(chunks, gather) => gather.each(|rows, rank, index| {
                compute(rank * chunks.splits + index, rows);
            }),
            Self::Bulk {
                comm,
                chunks,
                part,
                first,
            } => {
                let mut rows = first.wait();
                for index in 1.. {
                    let next = (index < chunks.splits)
                        .then(|| start_all_gather(chunks.own_rows(&part, index), 0, &comm));
                    compute(index - 1, rows);
                    let Some(next) = next else { return };
                    rows = next.wait();
                }
            }
        }
    }
}

/// A reduce-scatter along a sequence, in chunks of rows. A chunk is reduced while the next chunk is computed.
pub(super) struct ReduceScatterInChunks {
    comm: Comm,
    chunks: TokenChunks,
    /// The pending chunks, in order of arrival.
    in_flight: VecDeque<PendingTensor<2>>,
    /// In a ring, this rank's own terms, which are added last.
    own: Vec<Tensor<2>>,
    added: usize,
}

impl ReduceScatterInChunks {
    /// Starts the reduce-scatter. `term` computes this rank's contribution to a chunk, given the index of the chunk.
    pub fn of(chunks: TokenChunks, comm: &Comm, term: impl Fn(usize) -> Tensor<2>) -> Self {
        let mut sum = Self {
            comm: comm.clone(),
            chunks,
            in_flight: VecDeque::new(),
            own: vec![],
            added: 0,
        };
        for index in chunks.reduce_order() {
            sum.add(term(index));
        }
        sum
    }

    /// Adds this rank's term of the next chunk, in the order of [`TokenChunks::reduce_order`], and sends it. In a
    /// ring the term is added to the sum that was received from the previous rank.
    fn add(&mut self, term: Tensor<2>) {
        let (splits, step) = (self.chunks.splits, self.added / self.chunks.splits);
        self.added += 1;
        let pending = match self.chunks.method {
            TpCommOverlap::Bulk => start_reduce_scatter(term, 0, &self.comm),
            TpCommOverlap::Ring if self.added > splits * (self.comm.size() - 1) => {
                return self.own.push(term);
            }
            TpCommOverlap::Ring => {
                let received = (step > 0).then(|| self.in_flight.pop_front()).flatten();
                let sum = match received {
                    Some(received) => received.wait() + term,
                    None => term,
                };
                start_ring_shift(sum, &self.comm)
            }
        };
        self.in_flight.push_back(pending);
    }

    /// Returns this rank's part of the sum, `[batch, part, width]`. Waits for the chunks in flight.
    pub fn finish(self) -> Tensor<3> {
        let mut own = self.own.into_iter();
        let received = self.in_flight.into_iter().map(PendingTensor::wait);
        let chunks = received.map(|received| match own.next() {
            Some(own) => received + own,
            None => received,
        });
        self.chunks.along_sequence(chunks.collect())
    }
}
