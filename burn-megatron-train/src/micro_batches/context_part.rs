//! The part of each batch that a rank of a context group has.

use burn_megatron::comm::ParallelContext;
use burn_megatron::mesh::{ContextSplit, ContextSplitError};
use burn_megatron::nn::tp_comm_overlap::sequence_multiple;
use burn_megatron_data::{Batch, DataError};

/// The part of each batch that a rank of a context group has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ContextPart {
    split: ContextSplit,
    rank: usize,
    ranks: usize,
    /// The tensor ranks that share it.
    tensor: usize,
    /// Padded rows on the rank have a multiple of this number of tokens.
    multiple: usize,
    /// Of multi-token prediction.
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

    /// The same for whole rows.
    pub fn of_one_rank(self) -> Self {
        Self { ranks: 1, ..self }
    }

    /// Checks the length of a whole row. A split per document pads documents, so that any row of at least `2 context`
    /// tokens can be split.
    pub fn check(self, length: usize) -> Result<(), ContextSplitError> {
        match self.split {
            _ if self.ranks == 1 => Ok(()),
            ContextSplit::ZigzagPerDocument if length >= 2 * self.ranks => Ok(()),
            split => split.check(length, self.ranks, self.tensor),
        }
    }

    /// The part of a batch of whole rows, or of its rows that this is already.
    pub fn of_batch(self, batch: Batch) -> Result<Batch, DataError> {
        let batch = batch.with_further_tokens(self.further_depths);
        let tensor = match self.split {
            ContextSplit::ZigzagPerDocument => self.multiple,
            _ => self.tensor,
        };
        batch.in_context(self.split, (self.rank, self.ranks), tensor)
    }
}
