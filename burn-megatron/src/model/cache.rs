//! What generation keeps of the text that a model has read.

use std::fmt::Debug;

use burn::tensor::{Int, Tensor};

use super::{LanguageModel, Tokens};
use crate::collective::Comm;
use crate::nn::KvCache;

/// What generation keeps of the tokens that a model `M` has read, for the stages of one rank.
pub trait GenerationCache<M: ?Sized>: Debug + Sized {
    /// An empty cache.
    fn new(model: &M) -> Self;

    /// Called once on an empty cache, with the ranks that share a text. A cache may then hold a part of the tokens; by
    /// default each rank holds all, and reads all.
    fn over_context(self, _context: &Comm) -> Self {
        self
    }

    /// [`prefill`](Self::prefill) takes a multiple of this many tokens.
    fn prefill_multiple(&self) -> usize {
        1
    }

    /// Sets the number of tokens that the cache holds, per sequence: larger after a forward through all stages
    /// of this rank, smaller to drop the last tokens.
    fn set_len(&mut self, len: usize);

    /// Runs a stage on tokens `[sequences, new]` that follow those in the cache. Returns what
    /// [`hidden`](LanguageModel::hidden) returns for the whole sequences, or for their last tokens; those
    /// include the new ones. `input` is what the previous stage returned. There is no backward.
    fn hidden(
        &mut self,
        model: &M,
        stage: usize,
        input: Option<Tensor<3>>,
        ids: Tensor<2, Int>,
    ) -> Tensor<3>;

    /// Runs a stage on tokens that only the cache needs, not the logits. The ranks of a context group may each run it on
    /// a part of the tokens; `input` is then what the previous stage returned for the same part.
    fn prefill(
        &mut self,
        model: &M,
        stage: usize,
        input: Option<Tensor<3>>,
        ids: Tensor<2, Int>,
    ) -> Tensor<3> {
        self.hidden(model, stage, input, ids)
    }

    /// Its size on this rank in bytes.
    fn bytes(&self) -> usize;
}

/// Keeps the tokens only: each forward reads the whole text again, so that `n` tokens cost `n (n + 1) / 2`. It
/// serves any causal model.
#[derive(Debug)]
pub struct RecomputePrefix {
    /// `[sequences, read]`
    ids: Option<Tensor<2, Int>>,
    len: usize,
}

impl<M: LanguageModel> GenerationCache<M> for RecomputePrefix {
    fn new(_: &M) -> Self {
        Self { ids: None, len: 0 }
    }

    fn set_len(&mut self, len: usize) {
        self.len = len;
    }

    fn hidden(
        &mut self,
        model: &M,
        stage: usize,
        input: Option<Tensor<3>>,
        ids: Tensor<2, Int>,
    ) -> Tensor<3> {
        // Each stage of this rank appends the same new tokens to the first `len`.
        let whole = match self.ids.take() {
            Some(old) if self.len > 0 => Tensor::cat(vec![old.narrow(1, 0, self.len), ids], 1),
            _ => ids,
        };
        self.ids = Some(whole.clone());
        model.hidden(stage, input, Tokens::from(whole))
    }

    fn bytes(&self) -> usize {
        let ids = self.ids.iter();
        ids.map(|ids| ids.dims().iter().product::<usize>() * ids.dtype().size())
            .sum()
    }
}

/// A model whose attention layers read keys and values from a [`KvCache`], so that each token is read once.
pub trait CachedAttention: LanguageModel {
    /// The number of attention layers on this rank.
    fn attention_layers(&self) -> usize;

    /// Runs the layers of a stage on tokens `[sequences, new]` that follow those in the `cache`; returns
    /// what [`hidden`](LanguageModel::hidden) returns for them on the whole sequences, and writes their keys
    /// and values to the cache.
    ///
    /// # Panics
    ///
    /// If the capacity of the cache is exceeded.
    fn hidden_cached(
        &self,
        stage: usize,
        input: Option<Tensor<3>>,
        ids: Tensor<2, Int>,
        cache: &mut KvCache,
    ) -> Tensor<3>;
}

impl<M: CachedAttention> GenerationCache<M> for KvCache {
    fn new(model: &M) -> Self {
        Self::new(model.attention_layers(), model.context())
    }

    fn over_context(self, context: &Comm) -> Self {
        self.over_context(context)
    }

    fn prefill_multiple(&self) -> usize {
        self.ranks()
    }

    fn prefill(
        &mut self,
        model: &M,
        stage: usize,
        input: Option<Tensor<3>>,
        ids: Tensor<2, Int>,
    ) -> Tensor<3> {
        self.read_part(ids, |ids, cache| {
            model.hidden_cached(stage, input, ids, cache)
        })
    }

    fn set_len(&mut self, len: usize) {
        self.set_len(len);
    }

    fn hidden(
        &mut self,
        model: &M,
        stage: usize,
        input: Option<Tensor<3>>,
        ids: Tensor<2, Int>,
    ) -> Tensor<3> {
        model.hidden_cached(stage, input, ids, self)
    }

    fn bytes(&self) -> usize {
        self.bytes()
    }
}
