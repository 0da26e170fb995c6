//! Generation with a KV cache of latents. The cache holds `kv_rank + rope` features per token, independent of the
//! number of heads.
//!
//! The projections of keys and values are absorbed into the projections of queries and outputs (DeepSeek-V2, section
//! 2.1.2). Let `W_k` `[kv_rank, nope]` and `W_v` `[kv_rank, value]` be the slices of the key and value projections for
//! a head. Then:
//!
//! ```text
//! q . k = (q_nope W_k^T) . c + q_rope . k_rope        sum_j p_j v_j = (sum_j p_j c_j) W_v
//! ```
//!
//! All heads therefore share one key-value head, with the keys `c | k_rope` and the values `c`.

use burn::tensor::Tensor;
use burn_megatron_kernels::attention::composed;
use burn_megatron_kernels::rope::RopeTable;

use super::MultiLatentAttention;
use super::forward::Latents;
use crate::nn::context::CacheAttention;
use crate::nn::kv_cache::SequenceKvCache;
use crate::nn::{AttentionContext, LayerKvCache, anchored_value};

impl MultiLatentAttention {
    /// Appends the new tokens to the cache, and attends to the cached tokens.
    pub(super) fn cached(
        &self,
        latents: Latents,
        rotary: &RopeTable,
        layer: LayerKvCache<'_>,
    ) -> Tensor<3> {
        assert!(
            !latents.keys.is_autodiff(),
            "attention with a cache has no backward: expected tensors without autodiff"
        );
        let sizes = self.sizes;
        let positions = layer.positions(rotary, &latents.keys.device());
        let q = self.query_heads(latents.queries);
        let q = self.rotate(q, sizes.nope, rotary, &positions);
        let keys = self.entered(latents.keys);
        let new = self.rotated_latents(keys, rotary, &positions);
        layer.each_sequence([q.flatten(2, 3), new], |[q, new], layer| {
            let [batch, seq, _] = q.dims();
            let q = q.reshape([batch, seq, sizes.heads, sizes.nope + sizes.rope]);
            self.cached_sequence(q, new, layer)
        })
    }

    /// Attends to the cached tokens of one sequence. Takes the queries `[1, new, heads, nope + rope]` and the latents
    /// `[1, new, kv_rank + rope]`. Returns `[1, new, heads * value]`.
    fn cached_sequence(
        &self,
        q: Tensor<4>,
        new: Tensor<3>,
        layer: SequenceKvCache<'_>,
    ) -> Tensor<3> {
        let (sizes, first) = (self.sizes, layer.first);
        let entry = new.clone().unsqueeze_dim::<4>(2);
        if let Some((split, is_part)) = layer.split() {
            let q = self.absorbed(q);
            let q = if is_part { split.gather(q, first) } else { q };
            let own = layer.extend_own(&split, [entry]);
            let own = own.map(|([all], start)| (self.keys_and_values(all), start));
            let of = CacheAttention {
                scores: self.core.scores,
                sink: None,
                value_width: sizes.kv_rank,
                engine: None,
            };
            if is_part {
                return self.values(split.attend(&of, q, own, first, true));
            }
            // Queries are computed one by one, so that each result is bit-identical to a single query.
            let of_query = |i: usize| {
                let seen = split.own(first + i + 1);
                let own = own.clone().filter(|(_, start)| seen > *start);
                let own =
                    own.map(|(all, start)| (all.map(|x| x.narrow(1, 0, seen - start)), start));
                split.attend(&of, q.clone().narrow(1, i, 1), own, first + i, false)
            };
            return self.values(Tensor::cat((0..q.dims()[1]).map(of_query).collect(), 1));
        }
        let is_prefill = layer.is_prefill;
        let [all] = layer.extend([entry]);
        if is_prefill {
            // The training form needs fewer operations for many queries. The result is bit-identical to the training
            // forward pass for any chunk size.
            let [k, v] = self.expanded(all.squeeze_dim(2));
            let context = AttentionContext::Rows;
            return self
                .core
                .attend_separate([q, k, v], context, |weights, _| weights);
        }
        let [_, count, ..] = q.dims();
        let (q, [k, v]) = (self.absorbed(q), self.keys_and_values(all));
        let [_, keys, ..] = k.dims();
        // Queries are computed one by one, so that each result is bit-identical to a single query.
        let of_query = |i: usize| {
            let seen = |x: &Tensor<4>| x.clone().narrow(1, 0, keys + 1 + i - count);
            let (k, v, options) = (seen(&k), seen(&v), self.core.scores.causal());
            composed::flash_attention(q.clone().narrow(1, i, 1), k, v, None, &options)
        };
        self.values(Tensor::cat((0..count).map(of_query).collect(), 1))
    }

    /// Returns cached latents as the keys and the values of one group.
    fn keys_and_values(&self, all: Tensor<4>) -> [Tensor<4>; 2] {
        let values = all.clone().narrow(3, 0, self.sizes.kv_rank);
        [all, values]
    }

    /// Projects queries `[batch, new, heads, nope + rope]` to latent space: `[batch, new, heads, kv_rank + rope]`.
    fn absorbed(&self, q: Tensor<4>) -> Tensor<4> {
        let sizes = self.sizes;
        let of_keys = self.up_weight(&q, 0, sizes.nope);
        let latent = by_head(q.clone().narrow(3, 0, sizes.nope), of_keys.swap_dims(1, 2));
        Tensor::cat(vec![latent, q.narrow(3, sizes.nope, sizes.rope)], 3)
    }

    /// Projects sums of latents `[batch, new, heads, kv_rank]` to values: `[batch, new, heads * value]`.
    fn values(&self, latent: Tensor<4>) -> Tensor<3> {
        let of_values = self.up_weight(&latent, self.sizes.nope, self.sizes.value);
        by_head(latent, of_values).flatten(2, 3)
    }

    /// Returns `width` columns of each head of the up-projection, from `first` on: `[heads, kv_rank, width]`.
    fn up_weight(&self, x: &Tensor<4>, first: usize, width: usize) -> Tensor<3> {
        let sizes = self.sizes;
        let weight = anchored_value(&self.kv_up.weight, x).cast(x.dtype());
        let weight = weight.reshape([sizes.kv_rank, sizes.heads, sizes.nope + sizes.value]);
        weight.narrow(2, first, width).swap_dims(0, 1)
    }
}

/// Multiplies `[batch, new, heads, in]` by `[heads, in, out]`, head by head.
fn by_head(x: Tensor<4>, weight: Tensor<3>) -> Tensor<4> {
    let [batch, new, heads, width] = x.dims();
    let rows = x.permute([2, 0, 1, 3]).reshape([heads, batch * new, width]);
    let product = rows.matmul(weight);
    let out = product.dims()[2];
    product
        .reshape([heads, batch, new, out])
        .permute([1, 2, 0, 3])
}
