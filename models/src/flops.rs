//! The floating-point operations of a transformer, from the specifications of its layers.

use burn_megatron::nn::{MultiLatentAttentionConfig, ParallelAttentionConfig};
use burn_megatron_plan::flops::{
    attention_flops_per_token, keys_per_query, product_flops_per_token,
};

use crate::{FeedForwardSpec, LayerSpec, Mixer, StandardMixer, TransformerConfig};

/// The operations of a token in a part of a layer, over all ranks. [`burn_megatron_plan::flops`] says what counts.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LayerFlops {
    /// The weights of the matrix products.
    pub weights: u64,
    /// The operations of forward and backward that are no products with weights, such as attention's.
    pub others: f64,
}

impl LayerFlops {
    /// Returns the operations of attention in sequences of `seq` tokens.
    pub(crate) fn of_attention(config: &ParallelAttentionConfig, seq: usize) -> Self {
        let q = config.heads * config.head_width;
        let kv = config.groups * config.head_width;
        Self {
            weights: (config.hidden * 2 * (q + kv)) as u64,
            others: attention_flops_per_token(keys_per_query(seq, config.window), q, q),
        }
    }

    /// Returns the operations of latent attention in sequences of `seq` tokens.
    pub(crate) fn of_latent(config: &MultiLatentAttentionConfig, seq: usize) -> Self {
        let MultiLatentAttentionConfig {
            hidden,
            heads,
            q_rank,
            kv_rank,
            nope_width: nope,
            rope_width: rope,
            value_width: value,
            ..
        } = *config;
        let down = q_rank.unwrap_or(0) + kv_rank + rope;
        let queries = q_rank.unwrap_or(hidden) * (nope + rope);
        let heads_up = heads * (queries + kv_rank * (nope + value) + value * hidden);
        let keys = keys_per_query(seq, None);
        Self {
            weights: (hidden * down + heads_up) as u64,
            others: attention_flops_per_token(keys, heads * (nope + rope), heads * value),
        }
    }

    fn per_token(self) -> f64 {
        product_flops_per_token(self.weights as f64) + self.others
    }
}

impl FeedForwardSpec {
    /// The weights of the products of a token; routers are not counted.
    fn weights(&self) -> u64 {
        let (hidden, columns, activation) = match self {
            Self::Dense(mlp) => (mlp.hidden, mlp.width, mlp.activation),
            Self::Experts(experts) => {
                let shared = experts.shared.as_ref().map_or(0, |shared| shared.width);
                let router = &experts.router;
                let columns = router.experts_per_token * experts.width + shared;
                (router.hidden, columns, experts.activation)
            }
        };
        let matrices = if activation.is_gated() { 3 } else { 2 };
        (hidden * matrices * columns) as u64
    }
}

/// Returns the operations of a token in all layers, the output layer and the depths of multi-token prediction.
pub(crate) fn flops_per_token<X: Mixer>(
    config: &TransformerConfig,
    layers: &[LayerSpec<X::Spec>],
    seq: usize,
) -> f64 {
    let of_layer = |layer: &LayerSpec<X::Spec>| {
        let mut flops = X::flops(&layer.mixer, seq);
        flops.weights += layer.feed_forward.weights();
        flops.per_token()
    };
    let product = |weights: usize| product_flops_per_token(weights as f64);
    let output = product(config.hidden * config.vocabulary);
    let depths = config.mtp.as_ref().map_or(0, |mtp| mtp.layers) as f64;
    let further = layers.last().map_or(0.0, |last| {
        depths * (of_layer(last) + product(2 * config.hidden * config.hidden) + output)
    });
    layers.iter().map(of_layer).sum::<f64>() + output + further
}

impl TransformerConfig {
    /// Returns the floating-point operations of forward and backward per token, for sequences of `seq` tokens over all
    /// ranks.
    pub fn flops_per_token(&self, seq: usize) -> f64 {
        let layers: Vec<_> = (0..self.layers).map(|number| self.layer(number)).collect();
        flops_per_token::<StandardMixer>(self, &layers, seq)
    }
}
