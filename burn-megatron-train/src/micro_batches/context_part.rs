//! The part of each batch that belongs to a rank of a context group.

use burn_megatron::comm::ParallelContext;
use burn_megatron::mesh::{ContextSplit, ContextSplitError};
use burn_megatron::nn::tp_comm_overlap::sequence_multiple;
use burn_megatron_data::{Batch, DataError};

/// Selects the part of each batch that belongs to a rank of a context group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ContextPart {
    split: ContextSplit,
    rank: usize,
    ranks: usize,
    /// The number of tensor ranks that share the part (sequence parallelism).
    tensor: usize,
    /// The number of tokens of padded rows on the rank is a multiple of this number.
    multiple: usize,
    /// The number of depths of multi-token prediction.
    further_depths: usize,
}

impl ContextPart {
    pub fn of(groups: &ParallelContext, further_depths: usize) -> Self {
        let (config, context) = (groups.config(), groups.context());
        let (tensor, multiple) = match config.sequence_parallel {
            true => (config.tensor, sequence_multiple(config)),
            false => (1, 1),
        };
        Self {
            split: config.context_split,
            rank: context.rank(),
            ranks: context.size(),
            tensor,
            multiple,
            further_depths,
        }
    }

    /// Returns the same settings for rows that are not split.
    pub fn of_one_rank(self) -> Self {
        Self { ranks: 1, ..self }
    }

    /// Checks the length of a row before it is split. A split per document pads documents, so it can split any row of
    /// at least `2 context` tokens.
    pub fn check(self, length: usize) -> Result<(), ContextSplitError> {
        match self.split {
            _ if self.ranks == 1 => Ok(()),
            ContextSplit::ZigzagPerDocument if length >= 2 * self.ranks => Ok(()),
            split => split.check(length, self.ranks, self.tensor),
        }
    }

    /// Returns this rank's part of a batch. Batches that are already split are returned unchanged.
    pub fn of_batch(self, batch: Batch) -> Result<Batch, DataError> {
        let batch = batch.with_further_tokens(self.further_depths);
        let tensor = match self.split {
            ContextSplit::ZigzagPerDocument => self.multiple,
            _ => self.tensor,
        };
        batch.in_context(self.split, (self.rank, self.ranks), tensor)
    }
}
