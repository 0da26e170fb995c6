//! The distribution of a linear layer's input over the ranks of its group, and its communication.

use burn::tensor::Tensor;

use super::tp_comm_overlap::TpCommOverlapGroup;
use crate::collective::{
    Comm, PendingTensor, start_all_gather, start_all_reduce, start_reduce_scatter,
};
use crate::comm::ReduceOp;

/// The dimension of the sequence in `[batch, seq, hidden]`.
pub const SEQUENCE_DIM: usize = 1;

/// The distribution of a linear layer's input over the ranks of its group.
#[derive(Clone, Debug)]
pub enum InputLayout {
    /// Each rank has its own input; nothing is communicated.
    Local,
    /// Every rank has the same input; the backward all-reduces its gradient.
    Replicated(Comm),
    /// Each rank has a part of the sequence: the forward all-gathers the input, the backward
    /// reduce-scatters its gradient.
    SplitSequence(Comm),
    /// The same, with the exchanges in chunks that travel while the products of other chunks are computed.
    SplitSequenceInChunks(TpCommOverlapGroup),
    /// Each rank has a part of the features of every token, and the output is a sum over the ranks: the forward
    /// reduce-scatters it along the sequence, the backward all-gathers its gradient, in chunks.
    SplitFeatures(TpCommOverlapGroup),
}

impl InputLayout {
    /// Returns the layout of the input of a layer whose columns are split over the ranks, with exchanges as a whole.
    pub(super) fn whole(comm: &Comm, sequence_parallel: bool) -> Self {
        match (comm.size(), sequence_parallel) {
            (1, _) => Self::Local,
            (_, false) => Self::Replicated(comm.clone()),
            (_, true) => Self::SplitSequence(comm.clone()),
        }
    }

    /// Gathers the input of the whole sequence.
    pub(super) fn gathered(&self, x: Tensor<3>) -> PendingTensor<3> {
        match self.sequence_ranks() {
            Some(comm) => start_all_gather(x, SEQUENCE_DIM, comm),
            None => PendingTensor::ready(x),
        }
    }

    /// Reduces the gradient of the input of the whole sequence to the gradient of this rank's input.
    pub(super) fn reduced(&self, dx: Tensor<3>) -> PendingTensor<3> {
        match (self, self.sequence_ranks()) {
            (Self::Replicated(comm), _) => start_all_reduce(dx, ReduceOp::Sum, comm),
            (_, Some(comm)) => start_reduce_scatter(dx, SEQUENCE_DIM, comm),
            (_, None) => PendingTensor::ready(dx),
        }
    }

    /// Returns the group of exchanges in chunks, and whether the output is the sum that is exchanged.
    pub(super) fn in_chunks(&self) -> Option<(&TpCommOverlapGroup, bool)> {
        match self {
            Self::SplitSequenceInChunks(group) => Some((group, false)),
            Self::SplitFeatures(group) => Some((group, true)),
            Self::Local | Self::Replicated(_) | Self::SplitSequence(_) => None,
        }
    }

    /// Returns the ranks that each have a part of the sequence, if it is split.
    pub(super) fn sequence_ranks(&self) -> Option<&Comm> {
        match self {
            Self::SplitSequence(comm)
            | Self::SplitSequenceInChunks(TpCommOverlapGroup { comm, .. }) => Some(comm),
            Self::Local | Self::Replicated(_) | Self::SplitFeatures(_) => None,
        }
    }
}
