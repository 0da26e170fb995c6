//! Multi-token prediction of a decoder: a block of the last layer's kind on the last stage for each further token.

use super::block::{ELEMENT, norm_bytes, product, save};
use super::{Decoder, Share};
use crate::model_profile::{BlockProfile, ModelProfile};
use crate::profile::LayerProfile;

impl Decoder {
    /// Adds the depths to the last stage.
    pub(super) fn add_further(&self, model: &mut ModelProfile, share: Share) {
        let (h, local) = (self.hidden, share.tokens / share.sequence);
        let Some(block) = model.layers.last().map(|kind| model.kinds[*kind].clone()) else {
            return;
        };
        // One more pass of the output layer, whose weight is that of the model.
        let output = model.output.layer.clone();
        for _ in 0..self.mtp {
            let layer = &mut model.output.layer;
            add(layer, &model.embedding.layer);
            save(layer, "embedding", local * h);
            save(layer, "further input", local * 2 * h);
            layer.products.push(product(1, local, h, 2 * h));
            layer.streamed_bytes += norm_bytes(local, h) + 4 * local * h * ELEMENT;
            // Two norms, their concatenation, the product, the norm of the output.
            layer.operations += 5;
            add(layer, &block.layer);
            add(layer, &output);
            let BlockProfile { parameters, .. } = &mut model.output;
            parameters.add(block.parameters, 1);
            parameters.dense += 2 * h * h + 3 * self.norm();
        }
        if self.mtp > 0 && !self.tied {
            // The last stage has the embedding as well.
            let embedding = self.vocabulary * h / share.tensor;
            model.output.parameters.dense += embedding;
            model.tied += embedding;
        }
    }
}

/// Adds what another layer computes, keeps and sends, in turn.
fn add(layer: &mut LayerProfile, other: &LayerProfile) {
    layer.saved.extend(other.saved.iter().cloned());
    layer.products.extend(&other.products);
    layer.attention.extend(&other.attention);
    layer.exchanges.extend(&other.exchanges);
    layer.streamed_bytes += other.streamed_bytes;
    layer.operations += other.operations;
    layer.backward_bytes = layer.backward_bytes.max(other.backward_bytes);
}
