//! Attention on a fused QKV projection: by flash attention kernels, or with the scores,
//! `[batch, heads, seq, seq]`, in memory: a product, a softmax, dropout and another product.

use std::sync::Arc;

use burn::tensor::Tensor;
use burn_megatron_kernels::attention::{
    AttentionEngine, AttentionOptions, Heads, Window, composed, flash_attention_packed_with,
    flash_attention_with,
};
use burn_megatron_kernels::softmax::{self, Mask, Sink};

use super::{AttentionContext, LayerKvCache, PackedSequences};

/// The settings of the attention of one rank.
#[derive(Clone, Debug)]
pub(super) struct AttentionCore {
    pub heads: Heads,
    /// The sliding window. None: a query attends to all earlier tokens.
    pub window: Option<Window>,
    /// The engine of fused attention. None: attention is not fused.
    pub engine: Option<Arc<dyn AttentionEngine>>,
    /// Whether the softmax is fused where attention is not.
    pub fused_softmax: bool,
}

impl AttentionCore {
    /// `[batch, seq, (heads + 2 groups) * width]` to `[batch, seq, heads * width]`; `dropout` is applied to
    /// the probabilities.
    pub fn attend(
        &self,
        qkv: Tensor<3>,
        context: AttentionContext<'_>,
        dropout: impl FnOnce(Tensor<4>) -> Tensor<4>,
    ) -> Tensor<3> {
        match (context, self.engine.clone()) {
            (AttentionContext::Cached(layer), _) => self.cached(qkv, layer),
            (AttentionContext::Rows, Some(engine)) => {
                flash_attention_packed_with(engine, qkv, self.heads, None, &self.options())
            }
            (AttentionContext::Packed(packed), Some(engine)) => {
                self.flash_packed(engine, qkv, packed)
            }
            (AttentionContext::Rows, None) => self.unfused(qkv, &self.mask(), dropout),
            (AttentionContext::Packed(packed), None) => {
                self.unfused(qkv, &packed.mask(self.window), dropout)
            }
        }
    }

    fn options(&self) -> AttentionOptions {
        AttentionOptions {
            causal: true,
            window: self.window,
            ..AttentionOptions::default()
        }
    }

    fn mask(&self) -> Mask {
        match self.window {
            None => Mask::Causal,
            Some(Window { left, right }) => Mask::Window { left, right },
        }
    }

    /// The kernels apply the same document boundaries to every row, so the rows are concatenated to one.
    fn flash_packed(
        &self,
        engine: Arc<dyn AttentionEngine>,
        qkv: Tensor<3>,
        packed: &PackedSequences,
    ) -> Tensor<3> {
        let [batch, seq, features] = qkv.dims();
        let options = AttentionOptions {
            ranges: Some(packed.documents().clone()),
            ..self.options()
        };
        let qkv = qkv.reshape([1, batch * seq, features]);
        let out = flash_attention_packed_with(engine, qkv, self.heads, None, &options);
        out.reshape([batch, seq, self.heads.heads * self.heads.width])
    }

    /// Appends the new keys and values to the cache, and attends to all of it.
    fn cached(&self, qkv: Tensor<3>, layer: LayerKvCache<'_>) -> Tensor<3> {
        assert!(
            !qkv.is_autodiff(),
            "attention with a KV cache has no backward: expected tensors without autodiff"
        );
        let ([batch, seq, _], heads) = (qkv.dims(), self.heads);
        let part = |first: usize, count: usize| {
            let part = qkv.clone();
            let part = part.narrow(2, first * heads.width, count * heads.width);
            part.reshape([batch, seq, count, heads.width])
        };
        let q = part(0, heads.heads);
        let k = part(heads.heads, heads.groups);
        let v = part(heads.heads + heads.groups, heads.groups);
        let [k, v] = layer.extend([k, v]);
        let options = self.options();
        let out: Tensor<4> = match self.engine.clone() {
            Some(engine) => flash_attention_with(engine, q, k, v, None, &options),
            None => composed::flash_attention(q, k, v, None, &options),
        };
        out.flatten(2, 3)
    }

    /// Queries are multiplied as `[batch, groups, heads per group * seq, width]`, so that one product
    /// serves all heads of a group.
    fn unfused(
        &self,
        qkv: Tensor<3>,
        mask: &Mask,
        dropout: impl FnOnce(Tensor<4>) -> Tensor<4>,
    ) -> Tensor<3> {
        let [batch, seq, _] = qkv.dims();
        let Heads {
            heads: count,
            groups,
            width,
        } = self.heads;
        let part = |first: usize, heads: usize| {
            let part = qkv.clone().narrow(2, first * width, heads * width);
            part.reshape([batch, seq, heads, width]).swap_dims(1, 2)
        };
        let (k, v) = (part(count, groups), part(count + groups, groups));
        let grouped = [batch, groups, count / groups * seq];
        let q = part(0, count).reshape([grouped[0], grouped[1], grouped[2], width]);
        let scores = q.matmul(k.swap_dims(2, 3));
        let scores = scores.reshape([batch, count, seq, seq]);
        let scale = 1.0 / (width as f64).sqrt();
        let probabilities = if self.fused_softmax {
            softmax::masked_softmax(scores, scale, mask, Sink::None)
        } else {
            softmax::composed::masked_softmax(scores, scale, mask, Sink::None)
        };
        let weights = dropout(probabilities).reshape([grouped[0], grouped[1], grouped[2], seq]);
        let out = weights.matmul(v).reshape([batch, count, seq, width]);
        out.swap_dims(1, 2).reshape([batch, seq, count * width])
    }
}
