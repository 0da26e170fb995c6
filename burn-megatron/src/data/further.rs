//! The tokens after the next ones, for multi-token prediction.

use std::sync::Arc;

use burn_megatron_kernels::embedding::SortedLookups;

use super::IGNORE;
use crate::nn::context::SequenceShard;

/// What a depth of multi-token prediction reads and predicts at each token of a [`Batch`](super::Batch): depth `k` reads the
/// `k`-th token after it, and predicts the target of that token.
///
/// Nothing crosses a document: its last `k` tokens read token 0, and their targets are ignored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FurtherTokens {
    tokens: Vec<i32>,
    targets: Vec<i32>,
    sorted: Arc<SortedLookups>,
}

impl FurtherTokens {
    /// Those `depth` tokens later, of documents that end before the places `ends`.
    pub(super) fn new(
        tokens: &[i32],
        targets: &[i32],
        ends: impl Iterator<Item = usize>,
        depth: usize,
    ) -> Self {
        let (mut read, mut predicted, mut start) = (vec![], vec![], 0);
        for end in ends {
            let from = (start + depth).min(end);
            read.extend(&tokens[from..end]);
            read.resize(end, 0);
            predicted.extend(&targets[from..end]);
            predicted.resize(end, IGNORE);
            start = end;
        }
        Self::from_parts(read, predicted)
    }

    /// Those of a rank of a context group.
    pub(super) fn part(&self, shard: &SequenceShard) -> Self {
        Self::from_parts(shard.part(&self.tokens), shard.part(&self.targets))
    }

    fn from_parts(tokens: Vec<i32>, targets: Vec<i32>) -> Self {
        Self {
            sorted: Arc::new(SortedLookups::new(&tokens)),
            tokens,
            targets,
        }
    }

    /// The tokens that are read: `[rows, seq]`, row-major.
    pub fn tokens(&self) -> &[i32] {
        &self.tokens
    }

    /// The targets: `[rows, seq]`, row-major.
    pub fn targets(&self) -> &[i32] {
        &self.targets
    }

    /// The lookups of the tokens, sorted: see [`Tokens::sorted`](crate::nn::Tokens::sorted).
    pub fn sorted(&self) -> &Arc<SortedLookups> {
        &self.sorted
    }
}
