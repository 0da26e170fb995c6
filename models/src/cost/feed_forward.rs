//! Formulas for the cost of MLPs and mixtures of experts.

use burn_megatron::nn::moe::MoeMlpConfig;
use burn_megatron::nn::{Activation, ParallelMlpConfig};
use burn_megatron_plan::BlockProfile;
use burn_megatron_plan::profile::{ELEMENT, Product};

use super::{RankShare, dispatch};
use crate::FeedForwardSpec;

impl FeedForwardSpec {
    /// Returns the number of weights that each token is multiplied with. Routers are not counted.
    pub(super) fn weights(&self) -> u64 {
        let (hidden, columns, activation) = match self {
            Self::Dense(mlp) => (mlp.hidden, mlp.width, mlp.activation),
            Self::Experts(experts) => {
                let shared = experts.shared.as_ref().map_or(0, |shared| shared.width);
                let router = &experts.router;
                let columns = router.experts_per_token * experts.width + shared;
                (router.hidden, columns, experts.activation)
            }
        };
        (hidden * columns) as u64 * (inputs(activation) + 1)
    }
}

/// Returns the number of input projections of an MLP, which is 2 with a gate.
fn inputs(activation: Activation) -> u64 {
    if activation.is_gated() { 2 } else { 1 }
}

/// Returns the profile of an MLP without its norm.
pub(super) fn dense(config: &ParallelMlpConfig, share: &RankShare<'_>) -> BlockProfile {
    let mut block = BlockProfile::default();
    let (tokens, inputs) = (share.tokens(), inputs(config.activation));
    let (h, f) = (config.hidden as u64, config.width as u64 / share.tensor());
    let layer = &mut block.layer;
    layer.save("MLP up", tokens * inputs * f);
    layer.save("MLP activation", tokens * f);
    layer.multiply(tokens, inputs * f, h);
    layer.multiply(tokens, h, f);
    layer.streamed_bytes += (inputs + 1) * tokens * f * ELEMENT;
    // The operations are two matrix multiplications and the activation function.
    layer.operations += 3;
    layer.backward_bytes = ELEMENT * (share.stream() * h + tokens * (inputs + 1) * f);
    share.exchange_pair(layer, tokens * h * ELEMENT);
    let biases = if config.bias { inputs * f + h } else { 0 };
    block.parameters.dense = (inputs + 1) * h * f + biases;
    block
}

/// Returns the profile of an expert layer with its router, without its norm.
pub(super) fn experts(config: &MoeMlpConfig, share: &RankShare<'_>) -> BlockProfile {
    let mut block = BlockProfile::default();
    let router = &config.router;
    let [h, experts, per_token] =
        [router.hidden, router.experts, router.experts_per_token].map(|n| n as u64);
    let expert_tensor = share.layout.expert_tensor_size() as u64;
    // Each tensor-parallel rank routes its part of the sequence.
    let routed = share.tokens() / share.tensor();
    let rows = routed * per_token * expert_tensor;
    let own = experts / share.layout.expert as u64;
    let f = config.width as u64 / expert_tensor;
    let inputs = inputs(config.activation);
    let layer = &mut block.layer;
    layer.save("scores", 2 * routed * experts * 4 / ELEMENT);
    layer.save("rows", rows * h);
    layer.save("experts up", rows * inputs * f);
    layer.save("experts activation", rows * f);
    layer.multiply(routed, experts, h);
    let (batch, m) = (own, rows.div_ceil(own));
    layer
        .products
        .extend([(inputs * f, h), (h, f)].map(|(n, k)| Product { batch, m, n, k }));
    // Tokens are copied into the order of the experts, and back.
    let moved = 4 * rows * h + (inputs + 1) * rows * f;
    layer.streamed_bytes += moved * ELEMENT + 2 * routed * experts * 4;
    // The operations are three matrix multiplications, the selection of experts, sorting, copying the tokens in both
    // directions, and the activation function.
    layer.operations += 8;
    layer.backward_bytes = ELEMENT * (share.stream() * h + rows * ((inputs + 1) * f + h));
    layer.exchanges = dispatch::exchanges(config, share, routed);
    let biases = if config.bias {
        own * (inputs * f + h)
    } else {
        0
    };
    block.parameters.expert = own * (inputs + 1) * h * f + biases;
    let router_bias = if router.bias { experts } else { 0 };
    block.parameters.dense = h * experts + router_bias;
    if let Some(shared) = &config.shared {
        let mlp = ParallelMlpConfig::new(router.hidden, shared.width, config.activation);
        let mut shared = dense(&mlp.with_bias(false), share);
        // Only the saved tensors, matrix multiplications and communication of the shared expert are counted.
        shared.layer.streamed_bytes = 0;
        shared.layer.backward_bytes = 0;
        block.add(&shared);
    }
    block
}
