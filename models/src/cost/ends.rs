//! Formulas for the cost of the embedding, the output layer and the modules of multi-token prediction.

use burn_megatron::collective::ExchangeKind::{AllGather, AllReduce, ReduceScatter};
use burn_megatron::model::ModelConfig;
use burn_megatron_plan::profile::ELEMENT;
use burn_megatron_plan::profile::TrainingPass::{Backward, Forward};
use burn_megatron_plan::{BlockProfile, ModelProfile};

use super::{RankShare, norm_bytes, norm_elements};
use crate::{Positions, TransformerConfig};

/// The number of tokens in a chunk of the fused loss. Only the logits of one chunk are in memory.
const CHUNK: u64 = 1024;

/// Returns the number of elements of an embedding or an output layer on the rank.
pub(super) fn vocabulary_weights(config: &TransformerConfig, share: &RankShare<'_>) -> u64 {
    (config.local_logits(share.layout) * config.hidden) as u64
}

pub(super) fn embedding(config: &TransformerConfig, share: &RankShare<'_>) -> BlockProfile {
    let mut block = BlockProfile::default();
    let (h, layer) = (config.hidden as u64, &mut block.layer);
    let whole = share.tokens() * h * ELEMENT;
    layer.streamed_bytes = 2 * whole;
    layer.operations = 1;
    layer.output_bytes = share.stream() * h * ELEMENT;
    let calls: &[_] = match share.sequence() {
        1 => &[(AllReduce, Forward)],
        _ => &[(ReduceScatter, Forward), (AllGather, Backward)],
    };
    share.exchange(layer, whole, calls);
    let positions = match config.positions {
        Positions::Learned => config.context as u64,
        Positions::Rotary { .. } => 0,
    };
    block.parameters.dense = vocabulary_weights(config, share) + h * positions;
    block
}

pub(super) fn output(config: &TransformerConfig, share: &RankShare<'_>) -> BlockProfile {
    let mut block = BlockProfile::default();
    let (h, logits) = (
        config.hidden as u64,
        config.local_logits(share.layout) as u64,
    );
    let (tokens, elements) = (share.tokens(), share.stream() * h);
    let layer = &mut block.layer;
    layer.save("input", elements);
    layer.save("norm", elements);
    layer.multiply(tokens, logits, h);
    layer.streamed_bytes = norm_bytes(elements) + 2 * tokens * logits * ELEMENT;
    layer.operations = 3;
    // A chunk of logits and its gradient.
    layer.backward_bytes = tokens.min(CHUNK) * logits * 2 * 4;
    if share.sequence() > 1 {
        let calls = [(AllGather, Forward), (ReduceScatter, Backward)];
        share.exchange(layer, tokens * h * ELEMENT, &calls);
    }
    block.parameters.dense = h * logits + norm_elements(&config.norm());
    block
}

/// Adds the cost of the MTP modules to the last stage. Each module has a block with the same specification as the last
/// layer.
pub(super) fn add_further(
    config: &TransformerConfig,
    model: &mut ModelProfile,
    share: &RankShare<'_>,
) {
    let (h, local) = (config.hidden as u64, share.stream());
    let Some(block) = model.layers.last().map(|kind| model.kinds[*kind].clone()) else {
        return;
    };
    let depths = config.mtp.as_ref().map_or(0, |mtp| mtp.layers);
    // Each MTP module runs the output layer again, and shares its weight.
    let output = model.output.layer.clone();
    for _ in 0..depths {
        let layer = &mut model.output.layer;
        layer.add(&model.embedding.layer);
        layer.save("embedding", local * h);
        layer.save("further input", local * 2 * h);
        layer.multiply(local, h, 2 * h);
        layer.streamed_bytes += norm_bytes(local * h) + 4 * local * h * ELEMENT;
        // The operations are two norms, their concatenation, the projection, and the norm of the output.
        layer.operations += 5;
        model.output.add(&block);
        model.output.layer.add(&output);
        model.output.parameters.dense += 2 * h * h + 3 * norm_elements(&config.norm());
    }
    if depths > 0 && !config.tied {
        // The last stage also has the embedding.
        let embedding = vocabulary_weights(config, share);
        model.output.parameters.dense += embedding;
        model.tied += embedding;
    }
}
