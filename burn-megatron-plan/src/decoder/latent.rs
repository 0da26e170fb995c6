//! Latent attention of a decoder: see [`MultiLatentAttention`](burn_megatron::nn::MultiLatentAttention).

use super::super::BlockProfile;
use super::super::profile::{AttentionShape, TrainingPass};
use super::block::{ELEMENT, add, norm_bytes, product, save};
use super::{Decoder, Share};
use burn_megatron::collective::ExchangeKind;
use burn_megatron::mesh::{Axis, Grid};

const FORWARD: TrainingPass = TrainingPass::Forward;
const BACKWARD: TrainingPass = TrainingPass::Backward;

/// The widths of latent attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentWidths {
    /// The width of the latent of queries; 0 for none.
    pub q_rank: u64,
    /// The width of the latent of keys and values.
    pub kv_rank: u64,
    /// Of a query or key without a position.
    pub nope: u64,
    /// Of a query or key with a position.
    pub rope: u64,
    /// Of a value.
    pub value: u64,
}

impl LatentWidths {
    /// Features of all latents and the shared key.
    fn down(self) -> u64 {
        self.q_rank + self.kv_rank + self.rope
    }

    /// The weights of the matrices of a layer that every tensor rank has, and of those that are split by heads.
    pub(super) fn weights(self, hidden: u64, heads: u64) -> [u64; 2] {
        let queries = if self.q_rank > 0 { self.q_rank } else { hidden };
        let up = queries * (self.nope + self.rope) + self.kv_rank * (self.nope + self.value);
        [hidden * self.down(), heads * (up + self.value * hidden)]
    }
}

impl Decoder {
    /// Adds latent attention, with its norm and residual sum.
    pub(super) fn add_latent_attention(
        &self,
        block: &mut BlockProfile,
        share: Share,
        pairs: u64,
        latent: LatentWidths,
    ) {
        let (h, n) = (self.hidden, self.heads / share.tensor);
        let (tokens, local) = (share.tokens, share.tokens / share.sequence);
        // Keys and values are projected from the latents of all ranks that share the sequences.
        let keys = tokens * share.context;
        let width = latent.nope + latent.rope;
        let projected = tokens * n * width + keys * n * (width + latent.value);
        let layer = &mut block.layer;
        layer.output_bytes = local * h * ELEMENT;
        save(layer, "input", local * h);
        save(layer, "attention norm", local * h);
        save(layer, "latents", 2 * local * latent.down());
        save(layer, "queries, keys and values", projected);
        save(layer, "attended", tokens * n * latent.value);
        layer.products.push(product(1, local, latent.down(), h));
        let of_queries = if latent.q_rank > 0 { latent.q_rank } else { h };
        layer
            .products
            .push(product(1, tokens, n * width, of_queries));
        let up = n * (latent.nope + latent.value);
        layer.products.push(product(1, keys, up, latent.kv_rank));
        layer.products.push(product(1, tokens, h, n * latent.value));
        layer.attention.push(AttentionShape {
            pairs,
            heads: n,
            query_width: width,
            value_width: latent.value,
        });
        let norms = norm_bytes(local, latent.q_rank + latent.kv_rank) / 2;
        layer.streamed_bytes += norm_bytes(local, h) + norms + 2 * projected * ELEMENT;
        // The norm, four products, the norms of latents, the rotation, attention.
        layer.operations += 8;
        layer.backward_bytes = layer.output_bytes + ELEMENT * 2 * projected;
        self.add_latent_exchanges(block, share, latent);
        let [replicated, of_heads] = latent.weights(h, self.heads);
        let norms = self.norm() + latent.q_rank + latent.kv_rank;
        block.parameters.dense += replicated + of_heads / share.tensor + norms;
    }

    /// Adds the exchanges of the tensor ranks: the inputs of the projections of heads, and the output.
    fn add_latent_exchanges(&self, block: &mut BlockProfile, share: Share, latent: LatentWidths) {
        let layer = &mut block.layer;
        let mut of = |kind, features: u64, pass| {
            let bytes = share.tokens * features * ELEMENT;
            add(
                layer,
                kind,
                Grid::Dense,
                Axis::Tensor,
                share.tensor,
                bytes,
                pass,
            );
        };
        let (h, shared) = (self.hidden, latent.kv_rank + latent.rope);
        let queries = if latent.q_rank > 0 { latent.q_rank } else { h };
        if share.sequence == 1 {
            of(ExchangeKind::AllReduce, h, FORWARD);
            of(ExchangeKind::AllReduce, queries, BACKWARD);
            of(ExchangeKind::AllReduce, shared, BACKWARD);
        } else {
            of(ExchangeKind::AllGather, queries, FORWARD);
            of(ExchangeKind::AllGather, shared, FORWARD);
            of(ExchangeKind::ReduceScatter, h, FORWARD);
            of(ExchangeKind::AllGather, h, BACKWARD);
            of(ExchangeKind::AllGather, queries, BACKWARD);
            of(ExchangeKind::ReduceScatter, queries, BACKWARD);
            of(ExchangeKind::ReduceScatter, shared, BACKWARD);
        }
        let bytes = share.tokens * share.context * shared * ELEMENT;
        for (kind, pass) in [
            (ExchangeKind::AllGather, FORWARD),
            (ExchangeKind::ReduceScatter, BACKWARD),
        ] {
            add(
                layer,
                kind,
                Grid::Dense,
                Axis::Context,
                share.context,
                bytes,
                pass,
            );
        }
    }
}
