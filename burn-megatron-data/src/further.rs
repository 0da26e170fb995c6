//! The inputs and targets of multi-token prediction.

use std::sync::Arc;

use burn_megatron_kernels::embedding::SortedLookups;

use super::{Batch, IGNORE};
use burn_megatron::nn::RealTokens;
use burn_megatron::nn::context::SequenceShard;

/// The inputs and targets of one depth of multi-token prediction, for the tokens of a [`Batch`](super::Batch). For each
/// token, the input of depth `k` is the token `k` positions later, and the target of depth `k` is the target of this
/// later token.
///
/// Inputs and targets are always from the same document. For the last `k` tokens of a document, the input is token 0
/// and the target is ignored. These positions are [padding](Self::real) of this depth.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FurtherTokens {
    tokens: Vec<i32>,
    targets: Vec<i32>,
    sorted: Arc<SortedLookups>,
    real: Option<Arc<RealTokens>>,
}

impl FurtherTokens {
    /// Creates the inputs and targets of a depth from a batch of complete rows.
    pub(super) fn new(batch: &Batch, depth: usize) -> Self {
        let (tokens, targets, real) = (batch.tokens(), &batch.targets, batch.real());
        let ends = batch.document_ends().into_iter();
        let (mut read, mut predicted, mut start) = (vec![], vec![], 0);
        let mut is_real = vec![];
        for end in ends {
            let from = (start + depth).min(end);
            read.extend(&tokens[from..end]);
            read.resize(end, 0);
            predicted.extend(&targets[from..end]);
            predicted.resize(end, IGNORE);
            is_real.extend((from..end).map(|later| real.is_none_or(|real| real.is_real()[later])));
            is_real.resize(end, false);
            start = end;
        }
        Self::from_parts(read, predicted, RealTokens::new(is_real, batch.rows))
    }

    /// Returns the inputs and targets of a rank of a context group.
    pub(super) fn part(&self, shard: &SequenceShard) -> Self {
        let real = self.real.as_ref().map(|real| real.part(shard));
        Self::from_parts(shard.part(&self.tokens), shard.part(&self.targets), real)
    }

    fn from_parts(tokens: Vec<i32>, targets: Vec<i32>, real: Option<Arc<RealTokens>>) -> Self {
        Self {
            real,
            sorted: Arc::new(SortedLookups::new(&tokens)),
            tokens,
            targets,
        }
    }

    /// Returns the input tokens: `[rows, seq]`, row-major.
    pub fn tokens(&self) -> &[i32] {
        &self.tokens
    }

    /// Returns the targets: `[rows, seq]`, row-major.
    pub fn targets(&self) -> &[i32] {
        &self.targets
    }

    /// Returns the positions that are not padding at this depth `k`: the token `k` positions later is in the same
    /// document and is not padding. Returns `None` if no position is padding.
    pub fn real(&self) -> Option<&Arc<RealTokens>> {
        self.real.as_ref()
    }

    /// Returns the embedding lookups of the tokens, sorted by token: see
    /// [`Tokens::sorted`](burn_megatron::nn::Tokens::sorted).
    pub fn sorted(&self) -> &Arc<SortedLookups> {
        &self.sorted
    }
}
