//! The cache of previous tokens during generation, such as a KV cache.

use std::collections::BTreeMap;
use std::fmt::Debug;

use burn::tensor::{Int, Tensor};

use super::{LanguageModel, Tokens};
use crate::collective::Comm;
use crate::nn::{KvCache, NewTokens, RealTokens, SequencePart};

/// The cache of the tokens that a model `M` has processed during generation. It stores several sequences for the
/// pipeline stages of one rank.
pub trait GenerationCache<M: ?Sized>: Debug + Sized {
    /// Creates an empty cache.
    fn new(model: &M) -> Self;

    /// Splits the cache over the ranks of a context group. This method is called once, on an empty cache. The cache of
    /// a rank may then hold only a part of the tokens. By default each rank holds and processes all tokens.
    fn over_context(self, _context: &Comm) -> Self {
        self
    }

    /// Returns a number that must divide the number of tokens in [`prefill`](Self::prefill). If the number is above 1,
    /// the tokens belong to one sequence and include no padding.
    fn prefill_multiple(&self) -> usize {
        1
    }

    /// Returns the maximum number of sequences that one forward can process.
    fn max_sequences(&self) -> usize {
        usize::MAX
    }

    /// Sets the number of tokens of a sequence that the cache holds. The number is increased after a forward through
    /// all stages of this rank, and decreased to drop the last tokens. 0 also starts a new sequence.
    fn set_len(&mut self, sequence: usize, len: usize);

    /// Prepares a sequence of the cache for a text of `text` tokens. The first `same` tokens of the text are equal to
    /// the first tokens in the cache. Returns the number of these tokens that remain in the cache. All ranks of the
    /// tensor, pipeline and context groups must return the same number.
    fn begin(&mut self, sequence: usize, same: usize, _text: usize) -> usize {
        self.set_len(sequence, same);
        same
    }

    /// Returns the text length after which a growing text is processed again from its start, because its keys change.
    /// Draft tokens do not go beyond this length. Returns `None` if there is no such length.
    fn rereads_after(&self) -> Option<usize> {
        None
    }

    /// Runs a pipeline stage on new tokens, without a backward. The new tokens follow the cached tokens of their
    /// sequences.
    ///
    /// Returns the same output for these tokens as [`hidden`](LanguageModel::hidden) on the complete sequences,
    /// `[1, tokens, hidden]`. Alternatively, it returns only the rows of the last tokens (see
    /// [`last_rows`](Self::last_rows)). The number of tokens is padded at the end to a multiple of
    /// [`sequence_multiple`](LanguageModel::sequence_multiple). `input` is the output of the previous stage.
    fn hidden(
        &mut self,
        model: &M,
        stage: usize,
        input: Option<Tensor<3>>,
        new: &NewTokens,
    ) -> Tensor<3>;

    /// Runs a pipeline stage on tokens whose logits are not needed, to fill the cache. Each rank of a context group may
    /// run it on a part of the tokens. `input` is then the output of the previous stage for the same part.
    fn prefill(
        &mut self,
        model: &M,
        stage: usize,
        input: Option<Tensor<3>>,
        new: &NewTokens,
    ) -> Tensor<3> {
        self.hidden(model, stage, input, new)
    }

    /// Whether the model supports [`draft`](Self::draft). The default is `false`.
    fn can_draft(&self, _model: &M) -> bool {
        false
    }

    /// Runs the first depth of multi-token prediction on the last stage. This method is called before the number of
    /// cached tokens is [set](Self::set_len). `hidden` is the output of [`hidden`](Self::hidden) or, if `is_prefill`,
    /// of [`prefill`](Self::prefill) for the new tokens. `next` contains, for each new token, the token one position
    /// later. Returns the input of [`logits_of`](LanguageModel::logits_of), from which the tokens two positions later
    /// are predicted.
    fn draft(
        &mut self,
        _model: &M,
        _hidden: Tensor<3>,
        _next: &NewTokens,
        _is_prefill: bool,
    ) -> Tensor<3> {
        unreachable!("called where can_draft is false")
    }

    /// Returns the indices of the rows in the output of [`hidden`](Self::hidden) that belong to the last new token of
    /// each sequence.
    fn last_rows(&self, new: &NewTokens) -> Vec<usize> {
        let ends = new.parts.iter().scan(0, |end, part| {
            *end += part.count;
            Some(*end - 1)
        });
        ends.collect()
    }

    /// Returns the size of the cache on this rank in bytes.
    fn bytes(&self) -> usize;
}

/// A cache that stores only the token ids, for any causal model. Each forward processes the complete sequence again.
/// Generating `n` tokens therefore processes `n (n + 1) / 2` tokens.
#[derive(Debug)]
pub struct RecomputePrefix {
    sequences: BTreeMap<usize, Prefix>,
}

#[derive(Debug, Default)]
struct Prefix {
    /// `[1, read]`
    ids: Option<Tensor<2, Int>>,
    len: usize,
}

impl RecomputePrefix {
    fn len(&self, sequence: usize) -> usize {
        let prefix = self.sequences.get(&sequence);
        prefix.map_or(0, |prefix| prefix.len)
    }
}

impl<M: LanguageModel> GenerationCache<M> for RecomputePrefix {
    fn new(_: &M) -> Self {
        Self {
            sequences: BTreeMap::new(),
        }
    }

    fn max_sequences(&self) -> usize {
        1
    }

    fn set_len(&mut self, sequence: usize, len: usize) {
        self.sequences.entry(sequence).or_default().len = len;
    }

    fn hidden(
        &mut self,
        model: &M,
        stage: usize,
        input: Option<Tensor<3>>,
        new: &NewTokens,
    ) -> Tensor<3> {
        let [SequencePart { sequence, count }] = new.parts[..] else {
            panic!(
                "a cache of tokens reads one sequence at a time: expected new tokens of 1 sequence, got {}",
                new.parts.len()
            )
        };
        let prefix = self.sequences.entry(sequence).or_default();
        // Each stage of this rank appends the same new tokens to the first `len` tokens.
        let old = prefix.ids.take().filter(|_| prefix.len > 0);
        let old = old.map(|old| old.narrow(1, 0, prefix.len));
        let read = prefix.len + count;
        let padding = read.next_multiple_of(model.sequence_multiple()) - read;
        let new = new.ids.clone().narrow(1, 0, count);
        let padding = (padding > 0).then(|| Tensor::zeros([1, padding], &new.device()));
        let whole = [old, Some(new), padding].into_iter().flatten();
        let whole = Tensor::cat(whole.collect(), 1);
        prefix.ids = Some(whole.clone());
        let [_, tokens] = whole.dims();
        let is_real = (0..tokens).map(|token| token < read);
        let mut tokens = Tokens::from(whole);
        tokens.real = RealTokens::new(is_real.collect(), 1);
        model.hidden(stage, input, tokens)
    }

    fn last_rows(&self, new: &NewTokens) -> Vec<usize> {
        let last = |part: &SequencePart| self.len(part.sequence) + part.count - 1;
        new.parts.iter().map(last).collect()
    }

    fn bytes(&self) -> usize {
        let ids = self
            .sequences
            .values()
            .filter_map(|prefix| prefix.ids.as_ref());
        ids.map(|ids| ids.dims().iter().product::<usize>() * ids.dtype().size())
            .sum()
    }
}

/// A model whose attention layers read keys and values from a [`KvCache`], so that each token is processed
/// once.
pub trait CachedAttention: LanguageModel {
    /// Returns the sliding window of each attention layer on this rank: the number of earlier tokens that a token
    /// attends to. `None`: the token attends to all earlier tokens. The attention layer of
    /// [`draft_cached`](Self::draft_cached) comes last.
    fn attention_windows(&self) -> Vec<Option<usize>>;

    /// Returns the text length beyond which the keys of all tokens change, as in LongRoPE. A text that grows beyond
    /// this length is processed again from its start. Returns `None` if the keys do not depend on the text length. All
    /// ranks must return the same length.
    fn rereads_after(&self) -> Option<usize> {
        None
    }

    /// Runs the layers of a stage on the tokens `[1, tokens]` that the cache [reads](KvCache::read), and writes their
    /// keys and values to the cache. Returns the same output for these tokens as [`hidden`](LanguageModel::hidden) on
    /// the complete sequences.
    fn hidden_cached(
        &self,
        stage: usize,
        input: Option<Tensor<3>>,
        ids: Tensor<2, Int>,
        cache: &mut KvCache,
    ) -> Tensor<3>;

    /// Whether the last stage supports [`draft_cached`](Self::draft_cached). It must be the same on every rank.
    fn can_draft(&self) -> bool {
        false
    }

    /// Returns the output of the first depth of multi-token prediction for the tokens that the cache reads. `hidden` is
    /// the output of the final norm for these tokens. `next`, `[1, tokens]`, contains for each token the token one
    /// position later.
    fn draft_cached(
        &self,
        _hidden: Tensor<3>,
        _next: Tensor<2, Int>,
        _cache: &mut KvCache,
    ) -> Tensor<3> {
        unreachable!("called where can_draft is false")
    }
}

impl<M: CachedAttention> GenerationCache<M> for KvCache {
    fn new(model: &M) -> Self {
        Self::with_windows(model.attention_windows(), model.context())
            .with_rereads_after(model.rereads_after())
    }

    fn over_context(self, context: &Comm) -> Self {
        self.over_context(context)
    }

    fn prefill_multiple(&self) -> usize {
        self.ranks()
    }

    fn set_len(&mut self, sequence: usize, len: usize) {
        self.set_len(sequence, len);
    }

    fn begin(&mut self, sequence: usize, same: usize, text: usize) -> usize {
        self.begin(sequence, same, text)
    }

    fn rereads_after(&self) -> Option<usize> {
        self.rereads_after()
    }

    fn hidden(
        &mut self,
        model: &M,
        stage: usize,
        input: Option<Tensor<3>>,
        new: &NewTokens,
    ) -> Tensor<3> {
        self.read(&new.parts, new.ids.dims()[1]);
        model.hidden_cached(stage, input, new.ids.clone(), self)
    }

    fn prefill(
        &mut self,
        model: &M,
        stage: usize,
        input: Option<Tensor<3>>,
        new: &NewTokens,
    ) -> Tensor<3> {
        let ids = self.read_share(new);
        model.hidden_cached(stage, input, ids, self)
    }

    fn can_draft(&self, model: &M) -> bool {
        model.can_draft()
    }

    fn draft(
        &mut self,
        model: &M,
        hidden: Tensor<3>,
        next: &NewTokens,
        is_prefill: bool,
    ) -> Tensor<3> {
        let ids = match is_prefill {
            true => self.read_share(next),
            false => {
                self.read(&next.parts, next.ids.dims()[1]);
                next.ids.clone()
            }
        };
        model.draft_cached(hidden, ids, self)
    }

    fn bytes(&self) -> usize {
        self.bytes()
    }
}
