//! The KV cache of generation, split over the ranks of a context group. The tensors are not tracked by autodiff.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::Tensor;
use burn_megatron_kernels::attention::{
    AttentionEngine, KeyRanges, attention_forward, composed, merge,
};

use super::partial::{PartialResult, unseen, with_sink};
use crate::collective::{CollectiveOp, Comm, start, start_all_gather};
use crate::nn::score_options::ScoreOptions;
use crate::nn::wide::wide;

/// A KV cache that is split over a context group: rank `r` holds the tokens `r`, `r + ranks`, `r + 2 ranks`, ...
///
/// Ranks exchange queries, because a long text has fewer new queries than cached keys. Each rank computes the attention
/// of all queries to its own keys. The results are merged in rank order, so that they are bit-identical on every rank.
#[derive(Clone, Debug)]
pub(in crate::nn) struct CacheSplit {
    /// The ranks that share the sequences.
    pub comm: Comm,
}

/// The attention of one layer on a tensor rank.
pub(in crate::nn) struct CacheAttention {
    pub scores: ScoreOptions,
    /// The attention sink of each head: `[heads]`.
    pub sink: Option<Tensor<1>>,
    /// The number of features of a value.
    pub value_width: usize,
    /// The engine of fused attention. `None` if attention is not fused.
    pub engine: Option<Arc<dyn AttentionEngine>>,
}

impl CacheSplit {
    /// Returns the number of tokens that this rank holds among the first `len` tokens.
    pub fn own(&self, len: usize) -> usize {
        let (rank, ranks) = (self.comm.rank(), self.comm.size());
        (len + ranks - 1 - rank) / ranks
    }

    /// Returns the indices of this rank's tokens within `tokens`.
    pub fn own_places(&self, tokens: Range<usize>) -> impl Iterator<Item = usize> {
        let (rank, ranks) = (self.comm.rank(), self.comm.size());
        let first = (rank + ranks - tokens.start % ranks) % ranks;
        (first..tokens.len()).step_by(ranks)
    }

    /// Gathers the queries `[batch, part, heads, width]` of each rank to `[batch, part * ranks, heads, width]` in token
    /// order. `first` is the index of the first token.
    pub fn gather(&self, part: Tensor<4>, first: usize) -> Tensor<4> {
        let ([batch, count, heads, width], ranks) = (part.dims(), self.comm.size());
        let by_rank = start_all_gather(part.unsqueeze_dim::<5>(0), 0, &self.comm).wait();
        let ascending = rotate(by_rank, first % ranks);
        // [batch, part, ranks, heads, width]
        let ascending = ascending.permute([1, 2, 0, 3, 4]);
        ascending.reshape([batch, count * ranks, heads, width])
    }

    /// Exchanges results. Each rank has results for all queries, and receives the results of all ranks for its own
    /// queries.
    fn exchange(&self, all: Tensor<4>, first: usize) -> Tensor<5> {
        let ([batch, queries, heads, width], ranks) = (all.dims(), self.comm.size());
        let ascending = all.reshape([batch, queries / ranks, ranks, heads, width]);
        let ascending = ascending.permute([2, 0, 1, 3, 4]);
        let by_rank = rotate(ascending, (ranks - first % ranks) % ranks);
        let counts = vec![1; ranks];
        let op = CollectiveOp::AllToAll {
            send: counts.clone(),
            receive: counts,
        };
        start(by_rank, &op, &self.comm).wait()
    }

    /// Computes attention between the queries `q` `[batch, queries, heads, width]` and the keys and values of all
    /// ranks. `first` is the index of the first query token. `own` holds this rank's keys and values
    /// `[batch, keys, groups, ..]` and the index of their first token. Returns `[batch, queries, heads, value width]`.
    /// With `is_part` the queries are [gathered](Self::gather), and the result covers only this rank's queries,
    /// `[batch, queries / ranks, ..]`.
    pub fn attend(
        &self,
        of: &CacheAttention,
        q: Tensor<4>,
        own: Option<([Tensor<4>; 2], usize)>,
        first: usize,
        is_part: bool,
    ) -> Tensor<4> {
        let ([batch, _, heads, _], dtype) = (q.dims(), q.dtype());
        let width = of.value_width;
        let (out, lse) = self.attend_to_own(of, q, own, first);
        let packed = Tensor::cat(vec![out, lse.swap_dims(1, 2).unsqueeze_dim(3)], 3);
        let packed = if is_part {
            self.exchange(packed, first)
        } else {
            start_all_gather(packed.unsqueeze_dim(0), 0, &self.comm).wait()
        };
        let [ranks, _, queries, ..] = packed.dims();
        let result = |rank: usize| {
            let packed = packed.clone().narrow(0, rank, 1);
            let packed = packed.reshape([batch, queries, heads, width + 1]);
            let lse = packed.clone().narrow(3, width, 1).squeeze_dim::<3>(3);
            (packed.narrow(3, 0, width), lse.swap_dims(1, 2))
        };
        let merged = (0..ranks).map(result).reduce(merge);
        let merged = merged.unwrap_or_else(|| unreachable!("a group has ranks"));
        let (out, _) = match &of.sink {
            Some(sink) => with_sink(merged, sink.clone().cast(wide(dtype))),
            None => merged,
        };
        out.cast(dtype)
    }

    /// Computes the attention of the queries to the keys of this rank.
    fn attend_to_own(
        &self,
        of: &CacheAttention,
        q: Tensor<4>,
        own: Option<([Tensor<4>; 2], usize)>,
        first: usize,
    ) -> PartialResult {
        let Some(([k, v], start)) = own else {
            return unseen(&q.narrow(3, 0, of.value_width));
        };
        let visible = |token: usize| {
            let from = of
                .scores
                .window
                .map_or(0, |window| token.saturating_sub(window.left));
            self.own(from) - start..self.own(token + 1) - start
        };
        let ranges = (first..first + q.dims()[1]).map(visible).collect();
        let ranges = match KeyRanges::new(ranges, k.dims()[1], &q.device()) {
            Ok(ranges) => ranges,
            Err(error) => panic!("{error}"),
        };
        let options = of.scores.of_ranges(ranges);
        let dtype = wide(q.dtype());
        let (out, lse) = match &of.engine {
            Some(engine) => attention_forward(&**engine, q, k, v, None, &options),
            None => composed::attention_forward(q, k, v, None, &options),
        };
        (out.cast(dtype), lse)
    }
}

/// Rotates the rows of the first dim, so that row `by` becomes the first row.
fn rotate(x: Tensor<5>, by: usize) -> Tensor<5> {
    if by == 0 {
        return x;
    }
    let rows = x.dims()[0];
    let end = x.clone().narrow(0, by, rows - by);
    Tensor::cat(vec![end, x.narrow(0, 0, by)], 0)
}
