//! The layout of a linear layer's input over the ranks of its group, and the communication that the layout requires.

use burn::tensor::Tensor;

use super::tp_comm_overlap::TpCommOverlapGroup;
use crate::collective::{
    Comm, PendingTensor, start_all_gather, start_all_reduce, start_reduce_scatter,
};
use crate::comm::ReduceOp;

/// The index of the sequence dimension in `[batch, seq, hidden]`.
pub const SEQUENCE_DIM: usize = 1;

/// The layout of a linear layer's input over the ranks of its group.
#[derive(Clone, Debug)]
pub enum InputLayout {
    /// Each rank has its own input. There is no communication.
    Local,
    /// Every rank has the same input. The backward pass all-reduces the gradient of the input.
    Replicated(Comm),
    /// Each rank has a part of the sequence. The forward pass all-gathers the input, and the backward pass
    /// reduce-scatters the gradient of the input.
    SplitSequence(Comm),
    /// The same as `SplitSequence`, but the collectives are split into chunks that overlap with the matmuls of other
    /// chunks.
    SplitSequenceInChunks(TpCommOverlapGroup),
    /// Each rank has a part of the features of every token, and the output is a sum over the ranks. The forward pass
    /// reduce-scatters the output along the sequence. The backward pass all-gathers the gradient of the output. Both
    /// collectives are split into chunks.
    SplitFeatures(TpCommOverlapGroup),
}

impl InputLayout {
    /// Returns the input layout of a column-parallel layer whose collectives are not split into chunks.
    pub(super) fn whole(comm: &Comm, sequence_parallel: bool) -> Self {
        match (comm.size(), sequence_parallel) {
            (1, _) => Self::Local,
            (_, false) => Self::Replicated(comm.clone()),
            (_, true) => Self::SplitSequence(comm.clone()),
        }
    }

    /// Gathers the input of the complete sequence.
    pub(super) fn gathered(&self, x: Tensor<3>) -> PendingTensor<3> {
        match self.sequence_ranks() {
            Some(comm) => start_all_gather(x, SEQUENCE_DIM, comm),
            None => PendingTensor::ready(x),
        }
    }

    /// Reduces the gradient of the input of the complete sequence to the gradient of this rank's input.
    pub(super) fn reduced(&self, dx: Tensor<3>) -> PendingTensor<3> {
        match (self, self.sequence_ranks()) {
            (Self::Replicated(comm), _) => start_all_reduce(dx, ReduceOp::Sum, comm),
            (_, Some(comm)) => start_reduce_scatter(dx, SEQUENCE_DIM, comm),
            (_, None) => PendingTensor::ready(dx),
        }
    }

    /// Returns the group for collectives in chunks, and whether the collective is a sum of the output.
    pub(super) fn in_chunks(&self) -> Option<(&TpCommOverlapGroup, bool)> {
        match self {
            Self::SplitSequenceInChunks(group) => Some((group, false)),
            Self::SplitFeatures(group) => Some((group, true)),
            Self::Local | Self::Replicated(_) | Self::SplitSequence(_) => None,
        }
    }

    /// Returns the ranks that share a split sequence, or `None` if the sequence is not split.
    pub(super) fn sequence_ranks(&self) -> Option<&Comm> {
        match self {
            Self::SplitSequence(comm)
            | Self::SplitSequenceInChunks(TpCommOverlapGroup { comm, .. }) => Some(comm),
            Self::Local | Self::Replicated(_) | Self::SplitFeatures(_) => None,
        }
    }
}
