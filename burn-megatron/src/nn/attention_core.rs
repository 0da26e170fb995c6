//! Attention of a joint projection, by kernels that make its scores tile by tile, or with the scores,
//! `[batch, heads, seq, seq]`, in memory: a product, a softmax, dropout and another product.

use burn::tensor::Tensor;
use burn_megatron_kernels::attention::{
    AttentionOptions, Heads, Window, composed, flash_attention, flash_attention_packed,
};
use burn_megatron_kernels::softmax::{self, Mask, Sink};

use super::{CachedLayer, Packed, Sight};

/// The heads of a rank, what they see, and what computes it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Core {
    pub heads: Heads,
    /// How many tokens a query sees, itself included; all before it where not given.
    pub window: Option<usize>,
    pub fused: bool,
    /// Whether the softmax is a kernel where the whole is not.
    pub fused_softmax: bool,
}

impl Core {
    /// Attention of `[batch, seq, (heads + 2 groups) * width]`, giving `[batch, seq, heads * width]`;
    /// `dropout` acts on the probabilities.
    pub fn attend(
        &self,
        qkv: Tensor<3>,
        sight: Sight<'_>,
        dropout: impl FnOnce(Tensor<4>) -> Tensor<4>,
    ) -> Tensor<3> {
        match (sight, self.fused) {
            (Sight::After(layer), _) => self.after(qkv, layer),
            (Sight::Rows, true) => flash_attention_packed(qkv, self.heads, None, &self.options()),
            (Sight::Documents(packed), true) => self.in_one_row(qkv, packed),
            (Sight::Rows, false) => self.unfused(qkv, &self.mask(), dropout),
            (Sight::Documents(packed), false) => {
                self.unfused(qkv, &packed.mask(self.window), dropout)
            }
        }
    }

    fn options(&self) -> AttentionOptions {
        let window = |tokens: usize| Window {
            left: tokens - 1,
            right: 0,
        };
        AttentionOptions {
            causal: true,
            window: self.window.map(window),
            ..AttentionOptions::default()
        }
    }

    fn mask(&self) -> Mask {
        match self.window {
            None => Mask::Causal,
            Some(tokens) => Mask::Window {
                left: tokens - 1,
                right: 0,
            },
        }
    }

    /// The kernels cut every row in the same places, so the rows are laid end to end.
    fn in_one_row(&self, qkv: Tensor<3>, packed: &Packed) -> Tensor<3> {
        let [batch, seq, features] = qkv.dims();
        let options = AttentionOptions {
            documents: Some(packed.bounds().clone()),
            ..self.options()
        };
        let qkv = qkv.reshape([1, batch * seq, features]);
        let out = flash_attention_packed(qkv, self.heads, None, &options);
        out.reshape([batch, seq, self.heads.heads * self.heads.width])
    }

    /// Attention to what is in the cache, after the new keys and values were added there.
    fn after(&self, qkv: Tensor<3>, layer: CachedLayer<'_>) -> Tensor<3> {
        assert!(
            !qkv.is_autodiff(),
            "attention to a cache is for generation and has no backward; give it plain tensors"
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
        let out: Tensor<4> = match self.fused {
            true => flash_attention(q, k, v, None, &options),
            false => composed::flash_attention(q, k, v, None, &options),
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
        let probabilities = match self.fused_softmax {
            true => softmax::masked_softmax(scores, scale, mask, Sink::None),
            false => softmax::composed::masked_softmax(scores, scale, mask, Sink::None),
        };
        let weights = dropout(probabilities).reshape([grouped[0], grouped[1], grouped[2], seq]);
        let out = weights.matmul(v).reshape([batch, count, seq, width]);
        out.swap_dims(1, 2).reshape([batch, seq, count * width])
    }
}
