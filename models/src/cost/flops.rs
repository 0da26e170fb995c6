//! The FLOPs of a transformer, from the specifications of its layers.

use burn_megatron_plan::flops::product_flops_per_token;

use crate::{LayerFlops, LayerSpec, Mixer, StandardMixer, TransformerConfig};

/// Returns the FLOPs per token of all layers, the output layer and the MTP modules.
pub(crate) fn flops_per_token<X: Mixer>(
    config: &TransformerConfig,
    layers: &[LayerSpec<X::Spec>],
    seq: usize,
) -> f64 {
    let of_layer = |layer: &LayerSpec<X::Spec>| {
        let LayerFlops { weights, others } = X::flops(&layer.mixer, seq);
        product_flops_per_token((weights + layer.feed_forward.weights()) as f64) + others
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
    /// Returns the FLOPs per token of the forward and the backward, summed over all ranks, for sequences of `seq`
    /// tokens.
    pub fn flops_per_token(&self, seq: usize) -> f64 {
        let layers: Vec<_> = (0..self.layers).map(|number| self.layer(number)).collect();
        flops_per_token::<StandardMixer>(self, &layers, seq)
    }
}
