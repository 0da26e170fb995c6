//! Attention on a fused QKV projection, or on separate queries, keys and values. Attention uses flash attention
//! kernels, or it materializes the scores `[batch, heads, seq, seq]` in four steps: matmul, softmax, dropout, matmul.

use std::sync::Arc;

use burn::tensor::{Device, Tensor};
use burn_megatron_kernels::attention::{
    AttentionEngine, AttentionOptions, Heads, Window, composed, flash_attention_packed_with,
    flash_attention_with,
};
use burn_megatron_kernels::soft_cap::soft_cap;
use burn_megatron_kernels::softmax::{self, Mask, Sink};

use super::attention_logits::{AttentionLayer, LayerLogits};
use super::context::{CacheAttention, ContextAttention, QueryRows, SequenceShard};
use super::dropout::MaskRows;
use super::kv_cache::SequenceKvCache;
use super::score_options::ScoreOptions;
use super::{AttentionContext, BuildError, LayerKvCache, ModelBuilder, PackedSequences};
use crate::kernel_selection::Operation;

/// The settings of attention on one rank.
#[derive(Clone, Debug)]
pub(super) struct AttentionCore {
    pub heads: Heads,
    pub scores: ScoreOptions,
    /// The engine of fused attention. `None` if attention is not fused.
    pub engine: Option<Arc<dyn AttentionEngine>>,
    /// Whether the softmax of unfused attention is fused.
    fused_softmax: bool,
    /// The key-value exchanges of context parallelism: one for each number of ranks that may share a batch.
    pub context: Vec<ContextAttention>,
    /// The first head of this tensor rank, and the total number of heads.
    place: (usize, usize),
    /// The largest logits of a step. For fused attention, the engine measures them.
    logits: Arc<LayerLogits>,
}

impl AttentionCore {
    /// Builds the attention of `layer`. `heads` describes the heads of this rank, `value_width` is the number of
    /// features of a value, and `context` holds the context-parallel exchanges. The call is collective over the same
    /// ranks as [`ModelBuilder::attention_engine`].
    ///
    /// # Errors
    ///
    /// See [`ModelBuilder::attention_engine`].
    pub fn new(
        builder: &ModelBuilder,
        layer: AttentionLayer,
        (heads, value_width): (Heads, usize),
        scores: ScoreOptions,
        context: Vec<ContextAttention>,
    ) -> Result<Self, BuildError> {
        let place = (builder.place().index * heads.heads, layer.heads);
        let logits = builder.attention_logits().register(layer, place.0);
        // All exchanges of a layer have the same heads on a rank.
        let (of_engine, first) = match context.first() {
            Some(context) => (context.local_heads(heads), context.first_head(heads)),
            None => (heads, 0),
        };
        let engine = if builder.is_fused(Operation::Attention) {
            let engine = builder.attention_engine((of_engine, value_width), scores.window)?;
            Some(logits.measured(engine, first))
        } else {
            None
        };
        Ok(Self {
            heads,
            scores,
            engine,
            fused_softmax: builder.is_fused(Operation::Softmax),
            context,
            place,
            logits,
        })
    }

    /// Applies attention to `[batch, seq, (heads + 2 * groups) * width]` and returns `[batch, seq, heads * width]`.
    /// `sink` `[heads]` holds the attention sink of each head. `dropout` is applied to the probabilities. If the
    /// probabilities cover only some of this rank's heads or queries, `dropout` also gets the rows of the dropout mask
    /// to use.
    ///
    /// # Panics
    ///
    /// If `context` is [`AttentionContext::Sharded`], and there is no exchange for the number of ranks that share the
    /// batch.
    pub fn attend(
        &self,
        qkv: Tensor<3>,
        sink: Option<Tensor<1>>,
        context: AttentionContext<'_>,
        dropout: impl FnOnce(Tensor<4>, Option<MaskRows>) -> Tensor<4>,
    ) -> Tensor<3> {
        match (context, self.engine.clone()) {
            (AttentionContext::Cached(layer), _) => self.cached(qkv, sink, layer),
            (AttentionContext::Rows, Some(engine)) => {
                flash_attention_packed_with(engine, qkv, self.heads, sink, &self.scores.causal())
            }
            (AttentionContext::Packed(packed), Some(engine)) => {
                self.flash_packed(engine, qkv, sink, packed)
            }
            (AttentionContext::Sharded(shard), Some(engine)) => {
                let exchange = self.exchange(shard);
                exchange.attend(engine, (qkv, sink), self.heads, self.scores, shard)
            }
            (AttentionContext::Rows, None) => self.unfused_joint(qkv, sink, &self.mask(), dropout),
            (AttentionContext::Packed(packed), None) => {
                self.unfused_joint(qkv, sink, &packed.mask(self.scores.window), dropout)
            }
            (AttentionContext::Sharded(shard), None) => {
                self.unfused_sharded(qkv, sink, shard, dropout)
            }
        }
    }

    /// Applies attention to queries `[batch, queries, heads, width]`, keys `[batch, seq, groups, width]` and values
    /// `[batch, seq, groups, value width]`. Returns `[batch, queries, heads * value width]`. Keys and values cover
    /// complete sequences. Under context parallelism the queries are only this rank's queries.
    pub fn attend_separate(
        &self,
        [q, k, v]: [Tensor<4>; 3],
        context: AttentionContext<'_>,
        dropout: impl FnOnce(Tensor<4>, Option<MaskRows>) -> Tensor<4>,
    ) -> Tensor<3> {
        let ([batch, queries, ..], device) = (q.dims(), q.device());
        if let Some(engine) = self.engine.clone() {
            let [q, k, v] = self.rows_of_kernel([q, k, v], &context);
            let options = self.options_in(&context, &device);
            let out = flash_attention_with(engine, q, k, v, None, &options);
            let [_, _, heads, width] = out.dims();
            return out.reshape([batch, queries, heads * width]);
        }
        let (mask, rows) = match context {
            AttentionContext::Packed(packed) => (packed.mask(self.scores.window), None),
            AttentionContext::Sharded(shard) => {
                let rows = QueryRows {
                    shard,
                    tokens: shard.tokens().to_vec(),
                    heads: self.heads.heads,
                    first_head: self.place.0,
                    all_heads: self.place.1,
                };
                (rows.mask(self.scores.window, &device), Some(rows.draws()))
            }
            AttentionContext::Rows | AttentionContext::Cached(_) => (self.mask(), None),
        };
        self.unfused(([q, k, v], 0), None, &mask, |weights| {
            dropout(weights, rows)
        })
    }

    /// Reshapes projections to the rows that the kernels use. Packed and sharded batches become a single row, because
    /// the keys that a query attends to are a range of the concatenated rows.
    pub fn rows_of_kernel(
        &self,
        projections: [Tensor<4>; 3],
        context: &AttentionContext<'_>,
    ) -> [Tensor<4>; 3] {
        match context {
            AttentionContext::Rows | AttentionContext::Cached(_) => projections,
            AttentionContext::Packed(_) | AttentionContext::Sharded(_) => projections.map(|x| {
                let [batch, seq, heads, width] = x.dims();
                x.reshape([1, batch * seq, heads, width])
            }),
        }
    }

    /// Returns the attention options for the rows that [`rows_of_kernel`](Self::rows_of_kernel) returns.
    pub fn options_in(&self, context: &AttentionContext<'_>, device: &Device) -> AttentionOptions {
        match context {
            AttentionContext::Rows | AttentionContext::Cached(_) => self.scores.causal(),
            AttentionContext::Packed(packed) => AttentionOptions {
                ranges: Some(packed.documents().clone()),
                ..self.scores.causal()
            },
            AttentionContext::Sharded(shard) => {
                let ranges = shard.ranges_in_batch(self.scores.window, device);
                self.scores.of_ranges(ranges)
            }
        }
    }

    /// Returns the exchange between the ranks that share a batch.
    fn exchange(&self, shard: &SequenceShard) -> &ContextAttention {
        let of_size = |of: &&ContextAttention| of.groups.comm.size() == shard.ranks();
        let Some(context) = self.context.iter().find(of_size) else {
            let sizes = self.context.iter().map(|of| of.groups.comm.size());
            panic!(
                "a part of sequences that {} ranks share, with groups of {:?} ranks: expected whole ones without context \
                 parallelism, and one of these sizes with it",
                shard.ranks(),
                sizes.collect::<Vec<_>>()
            );
        };
        context
    }

    fn mask(&self) -> Mask {
        match self.scores.window {
            None => Mask::Causal,
            Some(Window { left, right }) => Mask::Window { left, right },
        }
    }

    /// Applies attention to the concatenated rows, because the kernels apply the same document boundaries to every
    /// row.
    fn flash_packed(
        &self,
        engine: Arc<dyn AttentionEngine>,
        qkv: Tensor<3>,
        sink: Option<Tensor<1>>,
        packed: &PackedSequences,
    ) -> Tensor<3> {
        let [batch, seq, features] = qkv.dims();
        let options = AttentionOptions {
            ranges: Some(packed.documents().clone()),
            ..self.scores.causal()
        };
        let qkv = qkv.reshape([1, batch * seq, features]);
        let out = flash_attention_packed_with(engine, qkv, self.heads, sink, &options);
        out.reshape([batch, seq, self.heads.heads * self.heads.width])
    }

    /// Appends the new keys and values to the cache, and attends to the cached tokens.
    fn cached(
        &self,
        qkv: Tensor<3>,
        sink: Option<Tensor<1>>,
        layer: LayerKvCache<'_>,
    ) -> Tensor<3> {
        assert!(
            !qkv.is_autodiff(),
            "attention with a KV cache has no backward: expected tensors without autodiff"
        );
        let sink = sink.map(Tensor::inner);
        layer.each_sequence([qkv], |[qkv], layer| {
            self.cached_sequence(qkv, sink.clone(), layer)
        })
    }

    /// Attends to the cached tokens of one sequence.
    fn cached_sequence(
        &self,
        qkv: Tensor<3>,
        sink: Option<Tensor<1>>,
        layer: SequenceKvCache<'_>,
    ) -> Tensor<3> {
        let [q, k, v] = self.split(&qkv);
        if let Some((split, is_part)) = layer.split() {
            let first = layer.first;
            let q = if is_part { split.gather(q, first) } else { q };
            let own = layer.extend_own(&split, [k, v]);
            let of = CacheAttention {
                scores: self.scores,
                value_width: self.heads.width,
                sink,
                engine: self.engine.clone(),
            };
            return split.attend(&of, q, own, first, is_part).flatten(2, 3);
        }
        let [k, v] = layer.extend([k, v]);
        let options = self.scores.causal();
        let out: Tensor<4> = match self.engine.clone() {
            Some(engine) => flash_attention_with(engine, q, k, v, sink, &options),
            None => composed::flash_attention(q, k, v, sink, &options),
        };
        out.flatten(2, 3)
    }

    /// Splits a projection into queries, keys and values, each `[batch, seq, heads or groups, width]`.
    fn split(&self, qkv: &Tensor<3>) -> [Tensor<4>; 3] {
        let ([batch, seq, _], heads) = (qkv.dims(), self.heads);
        let part = |first: usize, count: usize| {
            let part = qkv.clone();
            let part = part.narrow(2, first * heads.width, count * heads.width);
            part.reshape([batch, seq, count, heads.width])
        };
        [
            part(0, heads.heads),
            part(heads.heads, heads.groups),
            part(heads.heads + heads.groups, heads.groups),
        ]
    }

    fn unfused_joint(
        &self,
        qkv: Tensor<3>,
        sink: Option<Tensor<1>>,
        mask: &Mask,
        dropout: impl FnOnce(Tensor<4>, Option<MaskRows>) -> Tensor<4>,
    ) -> Tensor<3> {
        self.unfused((self.split(&qkv), 0), sink, mask, |probabilities| {
            dropout(probabilities, None)
        })
    }

    fn unfused_sharded(
        &self,
        qkv: Tensor<3>,
        sink: Option<Tensor<1>>,
        shard: &Arc<SequenceShard>,
        dropout: impl FnOnce(Tensor<4>, Option<MaskRows>) -> Tensor<4>,
    ) -> Tensor<3> {
        let exchange = self.exchange(shard);
        let sink = sink.map(|sink| exchange.own_sink(sink, self.heads));
        let first = exchange.first_head(self.heads);
        let attend = |projections, mask: &Mask, rows| {
            self.unfused((projections, first), sink, mask, |probabilities| {
                dropout(probabilities, Some(rows))
            })
        };
        let heads = (self.heads, self.scores.window);
        exchange.attend_unfused(qkv, heads, self.place, shard, attend)
    }

    /// Computes unfused attention for `[batch, queries, heads, width]`, `[batch, keys, groups, width]` and
    /// `[batch, keys, groups, value width]`. Returns `[batch, queries, heads * value width]`. `first` is the index of
    /// the first head on this tensor rank. Queries are multiplied as
    /// `[batch, groups, heads per group * queries, width]`, so that one matmul computes all heads of a group.
    fn unfused(
        &self,
        ([q, k, v], first): ([Tensor<4>; 3], usize),
        sink: Option<Tensor<1>>,
        mask: &Mask,
        dropout: impl FnOnce(Tensor<4>) -> Tensor<4>,
    ) -> Tensor<3> {
        let [batch, queries, count, width] = q.dims();
        let [_, keys, groups, value_width] = v.dims();
        let [q, k, v] = [q, k, v].map(|x| x.swap_dims(1, 2));
        let q = q.reshape([batch, groups, count / groups * queries, width]);
        let scores = q.matmul(k.swap_dims(2, 3));
        let scores = scores.reshape([batch, count, queries, keys]);
        let scale = self.scores.scale.unwrap_or(1.0 / (width as f64).sqrt());
        self.logits.measure(first, &scores, scale, mask);
        let (scores, scale) = match self.scores.soft_cap {
            Some(cap) => (soft_cap(scores.mul_scalar(scale), cap), 1.0),
            None => (scores, scale),
        };
        let sink = sink.map_or(Sink::None, Sink::PerHead);
        let probabilities = if self.fused_softmax {
            softmax::masked_softmax(scores, scale, mask, sink)
        } else {
            softmax::composed::masked_softmax(scores, scale, mask, sink)
        };
        let weights = dropout(probabilities);
        let weights = weights.reshape([batch, groups, count / groups * queries, keys]);
        let out = weights.matmul(v);
        let out = out.reshape([batch, count, queries, value_width]);
        let out = out.swap_dims(1, 2);
        out.reshape([batch, queries, count * value_width])
    }
}
