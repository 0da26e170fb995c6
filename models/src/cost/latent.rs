//! Formulas for the cost of [multi-head latent attention](burn_megatron::nn::MultiLatentAttention).

use burn_megatron::collective::ExchangeKind::{AllGather, AllReduce, ReduceScatter};
use burn_megatron::mesh::Axis;
use burn_megatron::nn::MultiLatentAttentionConfig;
use burn_megatron_plan::BlockProfile;
use burn_megatron_plan::flops::{attention_flops_per_token, keys_per_query};
use burn_megatron_plan::profile::TrainingPass::{Backward, Forward};
use burn_megatron_plan::profile::{AttentionShape, ELEMENT, LayerProfile};

use super::{RankShare, norm_bytes};
use crate::LayerFlops;

/// The sizes of a latent attention layer.
#[derive(Clone, Copy)]
struct Sizes {
    hidden: u64,
    heads: u64,
    /// The width of the query latent. 0 without a query latent.
    q_rank: u64,
    kv_rank: u64,
    nope: u64,
    rope: u64,
    value: u64,
}

impl Sizes {
    fn of(config: &MultiLatentAttentionConfig) -> Self {
        Self {
            hidden: config.hidden as u64,
            heads: config.heads as u64,
            q_rank: config.q_rank.unwrap_or(0) as u64,
            kv_rank: config.kv_rank as u64,
            nope: config.nope_width as u64,
            rope: config.rope_width as u64,
            value: config.value_width as u64,
        }
    }

    /// Returns the number of features of a query or key head.
    fn width(self) -> u64 {
        self.nope + self.rope
    }

    /// Returns the number of features of all latents and the shared key.
    fn down(self) -> u64 {
        self.q_rank + self.kv_rank + self.rope
    }

    /// Returns the number of input features of the query projection.
    fn of_queries(self) -> u64 {
        match self.q_rank {
            0 => self.hidden,
            rank => rank,
        }
    }

    /// Returns the number of weights in replicated matrices, and the number of weights in matrices that are split by
    /// heads.
    fn weights(self) -> [u64; 2] {
        let up = self.of_queries() * self.width() + self.kv_rank * (self.nope + self.value);
        let of_heads = self.heads * (up + self.value * self.hidden);
        [self.hidden * self.down(), of_heads]
    }
}

impl LayerFlops {
    /// Returns the FLOPs per token of latent attention, in sequences of `seq` tokens.
    pub(crate) fn of_latent(config: &MultiLatentAttentionConfig, seq: usize) -> Self {
        let sizes = Sizes::of(config);
        let features = |width: u64| (sizes.heads * width) as usize;
        let keys = keys_per_query(seq, None);
        Self {
            weights: sizes.weights().iter().sum(),
            others: attention_flops_per_token(keys, features(sizes.width()), features(sizes.value)),
        }
    }
}

/// Returns the profile of a latent attention layer without its norm.
pub(super) fn profile(config: &MultiLatentAttentionConfig, share: &RankShare<'_>) -> BlockProfile {
    let sizes = Sizes::of(config);
    let mut block = BlockProfile::default();
    let (h, n) = (sizes.hidden, sizes.heads / share.tensor());
    let (tokens, local) = (share.tokens(), share.stream());
    // Keys and values are projected from the latents of all context-parallel ranks.
    let keys = tokens * share.context();
    let width = sizes.width();
    let projected = tokens * n * width + keys * n * (width + sizes.value);
    let layer = &mut block.layer;
    layer.save("latents", 2 * local * sizes.down());
    layer.save("queries, keys and values", projected);
    layer.save("attended", tokens * n * sizes.value);
    layer.multiply(local, sizes.down(), h);
    layer.multiply(tokens, n * width, sizes.of_queries());
    layer.multiply(keys, n * (sizes.nope + sizes.value), sizes.kv_rank);
    layer.multiply(tokens, h, n * sizes.value);
    layer.attention.push(AttentionShape {
        pairs: share.pairs(None),
        heads: n,
        query_width: width,
        value_width: sizes.value,
    });
    let norms = norm_bytes(local * (sizes.q_rank + sizes.kv_rank)) / 2;
    layer.streamed_bytes += norms + 2 * projected * ELEMENT;
    // The operations are four matrix multiplications, the norms of the latents, the rotary position embedding and
    // attention.
    layer.operations += 7;
    layer.backward_bytes = ELEMENT * (local * h + 2 * projected);
    add_exchanges(layer, sizes, share);
    let [replicated, of_heads] = sizes.weights();
    block.parameters.dense = replicated + of_heads / share.tensor() + sizes.q_rank + sizes.kv_rank;
    block
}

/// Adds the collectives over the tensor axis (for the inputs of the head projections, and for the output) and over the
/// context axis (for the latents of keys and values).
fn add_exchanges(layer: &mut LayerProfile, sizes: Sizes, share: &RankShare<'_>) {
    let (h, shared) = (sizes.hidden, sizes.kv_rank + sizes.rope);
    let queries = sizes.of_queries();
    let calls: &[_] = match share.sequence() {
        1 => &[
            (AllReduce, h, Forward),
            (AllReduce, queries, Backward),
            (AllReduce, shared, Backward),
        ],
        _ => &[
            (AllGather, queries, Forward),
            (AllGather, shared, Forward),
            (ReduceScatter, h, Forward),
            (AllGather, h, Backward),
            (AllGather, queries, Backward),
            (ReduceScatter, queries, Backward),
            (ReduceScatter, shared, Backward),
        ],
    };
    for (kind, features, pass) in calls {
        let bytes = share.tokens() * features * ELEMENT;
        share.exchange(layer, bytes, &[(*kind, *pass)]);
    }
    let bytes = share.tokens() * share.context() * shared * ELEMENT;
    for (kind, pass) in [(AllGather, Forward), (ReduceScatter, Backward)] {
        layer.exchange(kind, Axis::Context, share.context(), bytes, pass);
    }
}
