//! The attention of one layer over the ranks of a context group.

use std::sync::Arc;

use burn::tensor::{DType, Tensor};
use burn_megatron_kernels::apply;
use burn_megatron_kernels::attention::{AttentionEngine, Heads, flash_attention_packed_with};

use super::exchange::KeyValueExchange;
use super::function::ExchangedAttention;
use super::groups::ContextGroups;
use super::head_split::HeadSplit;
use super::partial::PartialAttention;
use super::shard::{Members, QueryPart, SequenceShard};
use crate::collective;
use crate::nn::score_options::ScoreOptions;
use crate::nn::wide::wide;

/// The attention of one layer over the tokens of all ranks that share a sequence.
#[derive(Clone, Debug)]
pub(in crate::nn) struct ContextAttention {
    pub groups: ContextGroups,
    /// The exchange of keys and values between groups of neighbouring ranks. `None` if there is only one such group.
    pub exchange: Option<Arc<dyn KeyValueExchange>>,
    /// Whether gradients of keys and values are exchanged in the dtype of the model instead of f32 (f64 for an f64
    /// model).
    pub narrow_gradients: bool,
}

impl ContextAttention {
    /// Returns the heads that a rank computes after the all-to-all. If there are fewer key-value heads than neighbours,
    /// each neighbour has one key-value head.
    pub fn local_heads(&self, heads: Heads) -> Heads {
        let neighbours = self.groups.inner.size();
        Heads {
            heads: heads.heads / neighbours,
            groups: heads.groups.div_ceil(neighbours),
            ..heads
        }
    }

    /// Returns the sinks of the heads that a rank computes. `heads` are the heads before the all-to-all.
    pub fn own_sink(&self, sink: Tensor<1>, heads: Heads) -> Tensor<1> {
        let own = self.local_heads(heads).heads;
        sink.narrow(0, self.first_head(heads), own)
    }

    /// Returns the first head that a rank computes. `heads` are the heads before the all-to-all.
    pub fn first_head(&self, heads: Heads) -> usize {
        self.groups.inner.rank() * self.local_heads(heads).heads
    }

    /// Returns the ranks whose queries this rank computes.
    pub fn queries(&self) -> Members {
        self.groups.outer.members(self.groups.outer.comm.rank())
    }

    /// Applies fused attention to `[batch, seq / context, (heads + 2 * groups) * width]`. Returns
    /// `[batch, seq / context, heads * width]`.
    pub fn attend(
        &self,
        engine: Arc<dyn AttentionEngine>,
        (qkv, sink): (Tensor<3>, Option<Tensor<1>>),
        heads: Heads,
        scores: ScoreOptions,
        shard: &Arc<SequenceShard>,
    ) -> Tensor<3> {
        let sink = sink.map(|sink| self.own_sink(sink, heads));
        self.with_own_heads(qkv, heads, shard, |qkv, heads| {
            let [tokens, units, width] = qkv.dims();
            let Some(exchange) = &self.exchange else {
                let members = (self.queries(), self.queries());
                let part = QueryPart::All;
                let ranges = shard.ranges(members, part, scores.window, &qkv.device());
                let options = scores.of_ranges(ranges);
                let qkv = qkv.reshape([1, tokens, units * width]);
                let out = flash_attention_packed_with(engine, qkv, heads, sink, &options);
                return out.reshape([tokens, heads.heads, width]);
            };
            let of = PartialAttention {
                engine,
                heads,
                scores,
                shard: shard.clone(),
                queries: self.queries(),
                narrow_gradients: self.narrow_gradients,
            };
            let exchange = exchange.clone();
            // The sink has the dtype of the softmax statistics.
            let sink = sink.map(|sink| sink.cast::<DType>(wide(qkv.dtype())).into_dispatch());
            let inputs = std::iter::once(qkv.into_dispatch()).chain(sink);
            apply(inputs.collect(), ExchangedAttention { of, exchange })
        })
    }

    /// Runs `compute` on the projection `[tokens, heads + 2 groups, width]` of this rank's heads, for the tokens of
    /// its neighbours in ascending order. Sends the result `[tokens, heads, width]` back to the owners of the tokens.
    pub fn with_own_heads(
        &self,
        qkv: Tensor<3>,
        heads: Heads,
        shard: &Arc<SequenceShard>,
        compute: impl FnOnce(Tensor<3>, Heads) -> Tensor<3>,
    ) -> Tensor<3> {
        let [batch, local, _] = qkv.dims();
        let tokens = batch * local;
        let units = heads.heads + 2 * heads.groups;
        let qkv = qkv.reshape([tokens, units, heads.width]);
        let (inner, features) = (&self.groups.inner, heads.heads * heads.width);
        let neighbours = inner.size();
        if neighbours == 1 {
            return compute(qkv, heads).reshape([batch, local, features]);
        }
        let own = self.local_heads(heads);
        let order = shard.order(self.queries(), &qkv.device());
        // [neighbours * tokens, own units, width]: the heads of each neighbour.
        let of_neighbours = HeadSplit { heads, neighbours }.split(qkv);
        let counts = vec![tokens; neighbours];
        let gathered = collective::all_to_all(of_neighbours, counts.clone(), counts.clone(), inner);
        let out = order.by_rank(compute(order.ascending(gathered), own));
        let back = collective::all_to_all(out, counts.clone(), counts, inner);
        // [neighbours, tokens, own heads, width]
        let back = back.reshape([neighbours, tokens, own.heads, heads.width]);
        back.swap_dims(0, 1).reshape([batch, local, features])
    }
}

/// Checks that query heads and key-value heads can be split over the `neighbours` ranks of an all-to-all.
///
/// # Errors
///
/// A message with the reason, and the possible numbers of ranks.
pub(in crate::nn) fn check_heads(heads: Heads, neighbours: usize) -> Result<(), String> {
    let fits = |ranks: usize| {
        heads.heads.is_multiple_of(ranks)
            && (heads.groups.is_multiple_of(ranks) || ranks.is_multiple_of(heads.groups))
    };
    if fits(neighbours) {
        return Ok(());
    }
    let all = (1..=heads.heads).filter(|ranks| fits(*ranks));
    let all: Vec<_> = all.map(|ranks| ranks.to_string()).collect();
    Err(format!(
        "an all-to-all of {neighbours} ranks cannot split {} heads and {} groups of keys and values of a tensor rank: \
         use one of {} ranks",
        heads.heads,
        heads.groups,
        all.join(", ")
    ))
}
