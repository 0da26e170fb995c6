//! Formulas for the cost of attention.

use burn_megatron::collective::ExchangeKind;
use burn_megatron::kernels::attention::Heads;
use burn_megatron::mesh::{Axis, ContextExchange, Grid};
use burn_megatron::nn::context::ExchangeProblem;
use burn_megatron::nn::{ParallelAttentionConfig, QkNorm};
use burn_megatron_plan::BlockProfile;
use burn_megatron_plan::flops::{attention_flops_per_token, keys_per_query};
use burn_megatron_plan::profile::{
    AttentionShape, ELEMENT, Exchange, GroupPart, LayerProfile, TrainingPass,
};

use super::RankShare;
use crate::LayerFlops;

impl LayerFlops {
    /// Returns the FLOPs per token of attention, in sequences of `seq` tokens.
    pub(crate) fn of_attention(config: &ParallelAttentionConfig, seq: usize) -> Self {
        let q = config.heads * config.head_width;
        let kv = config.groups * config.head_width;
        Self {
            weights: (config.hidden * 2 * (q + kv)) as u64,
            others: attention_flops_per_token(keys_per_query(seq, config.window), q, q),
        }
    }
}

impl RankShare<'_> {
    /// Returns the number of query-key pairs of this rank that attention computes.
    pub(super) fn pairs(&self, window: Option<usize>) -> u64 {
        (self.all_tokens() as f64 * keys_per_query(self.seq, window)) as u64 / self.context()
    }
}

/// Returns the profile of an attention layer without its norm.
pub(super) fn profile(config: &ParallelAttentionConfig, share: &RankShare<'_>) -> BlockProfile {
    let mut block = BlockProfile::default();
    let (tokens, tensor) = (share.tokens(), share.tensor());
    let [h, width] = [config.hidden, config.head_width].map(|n| n as u64);
    let heads = config.heads as u64 / tensor;
    // If there are more tensor-parallel ranks than key-value groups, the groups are replicated.
    let kv = (config.groups as u64 / tensor).max(1) * width;
    let q = heads * width;
    let layer = &mut block.layer;
    layer.save("queries, keys and values", tokens * (q + 2 * kv));
    layer.save("attended", tokens * q);
    layer.multiply(tokens, q + 2 * kv, h);
    layer.multiply(tokens, h, q);
    layer.attention.push(AttentionShape {
        pairs: share.pairs(config.window),
        heads,
        query_width: width,
        value_width: width,
    });
    let qk_norm = config.qk_norm.as_ref().map(|norm| norm.kind);
    let passes = if qk_norm.is_some() { 2 } else { 1 };
    layer.streamed_bytes += passes * 2 * tokens * (q + kv) * ELEMENT;
    // The operations are two matrix multiplications, the rotary position embedding and attention.
    layer.operations += 3 + passes;
    layer.backward_bytes = ELEMENT * (share.stream() * h + 2 * tokens * (q + 2 * kv));
    share.exchange_pair(layer, tokens * h * ELEMENT);
    if qk_norm == Some(QkNorm::Whole) {
        // The ranks all-reduce the means of the queries and the keys of each token, in f32.
        let calls = PASSES.map(|pass| (ExchangeKind::AllReduce, pass));
        share.exchange(layer, 2 * tokens * 4, &calls);
    }
    if config.soft_cap.is_some() {
        add_scores(
            layer,
            heads * (share.all_tokens() * share.seq as u64 / share.context()),
        );
    }
    if share.layout.context > 1 {
        add_context_exchange(layer, config, share);
    }
    let norms = match qk_norm {
        None => 0,
        Some(QkNorm::Heads) => 2 * width,
        Some(QkNorm::Whole) => q + kv,
    };
    let optional = [
        (config.qkv_bias, q + 2 * kv),
        (config.bias, h),
        (config.sinks, heads),
    ];
    let optional = optional.into_iter().filter(|(has, _)| *has);
    block.parameters.dense =
        h * (2 * q + 2 * kv) + norms + optional.map(|(_, elements)| elements).sum::<u64>();
    block
}

const PASSES: [TrainingPass; 2] = [TrainingPass::Forward, TrainingPass::Backward];

/// Adds the attention scores and probabilities. With a soft cap, they are stored in memory, including masked scores.
fn add_scores(layer: &mut LayerProfile, elements: u64) {
    layer.save("scores", elements);
    layer.save("probabilities", elements);
    // The matrix multiplications, the soft cap and the softmax write them.
    layer.streamed_bytes += 6 * elements * ELEMENT;
    layer.operations += 3;
    layer.backward_bytes += 2 * elements * ELEMENT;
}

/// Adds the communication over the context axis, with the exchange method that a model selects for one sequence.
fn add_context_exchange(
    layer: &mut LayerProfile,
    config: &ParallelAttentionConfig,
    share: &RankShare<'_>,
) {
    let layout = share.layout;
    let heads = Heads {
        heads: config.heads / layout.tensor,
        groups: (config.groups / layout.tensor).max(1),
        width: config.head_width,
    };
    let one = ExchangeProblem::of_layout(layout, heads, share.seq, 2);
    let exchange = one.resolve(layout.context_exchange, true);
    let exchange = exchange.unwrap_or(ContextExchange::AllGather);
    let all = ExchangeProblem::of_layout(layout, heads, share.samples * share.seq, 2);
    let (cost, ranks) = (all.cost(exchange), share.context());
    // Each rank sends the complete tensor except its own part.
    let whole = ranks as f64 / (ranks - 1) as f64;
    // `operations` is the number of additional operations compared with attention on one rank. With an all-to-all, the
    // heads are split and the tokens are ordered, in both directions. With a ring, attention runs for each block, and
    // the results are merged.
    let (kind, factor, operations) = match exchange {
        ContextExchange::Ring | ContextExchange::Hierarchical => {
            (ExchangeKind::SendReceive, 1.0, 2 * ranks - 1)
        }
        ContextExchange::AllGather => (ExchangeKind::AllGather, whole, 1),
        ContextExchange::AllToAll => (ExchangeKind::AllToAll, whole, 4),
    };
    layer.operations += operations;
    let bytes = [cost.forward, cost.backward].map(|bytes| (bytes * factor) as u64);
    for (pass, bytes) in PASSES.into_iter().zip(bytes) {
        layer.exchanges.push(Exchange {
            kind,
            grid: Grid::Dense,
            axes: Axis::Context.into(),
            part: GroupPart::Whole,
            ranks,
            bytes,
            pass,
        });
    }
}
