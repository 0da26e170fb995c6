//! The layers of a decoder.

use super::super::profile::{
    AttentionShape, Exchange, GroupPart, LayerProfile, Product, SavedTensor, TrainingPass,
};
use super::super::{BlockProfile, GridElements};
use super::{Decoder, Experts, Share, experts};
use burn_megatron::collective::ExchangeKind;
use burn_megatron::mesh::{Axis, AxisSet, ContextExchange, Grid};
use burn_megatron::nn::QkNorm;
use burn_megatron::nn::context::ExchangeProblem;

/// Bytes of an element.
pub(super) const ELEMENT: u64 = 2;

/// Tokens whose logits are in memory at once: a chunk of the fused loss.
const CHUNK: u64 = 1024;

const FORWARD: TrainingPass = TrainingPass::Forward;
const BACKWARD: TrainingPass = TrainingPass::Backward;

impl Decoder {
    /// Adds the attention of a layer, with its norm and residual sum.
    pub(super) fn add_attention(&self, block: &mut BlockProfile, share: Share, pairs: u64) {
        let (h, width) = (self.hidden, self.head_width);
        let (tokens, local) = (share.tokens, share.tokens / share.sequence);
        let q = self.heads * width / share.tensor;
        // More tensor ranks than groups hold copies of them.
        let kv = (self.groups / share.tensor).max(1) * width;
        let layer = &mut block.layer;
        layer.output_bytes = local * h * ELEMENT;
        save(layer, "input", local * h);
        save(layer, "attention norm", local * h);
        save(layer, "queries, keys and values", tokens * (q + 2 * kv));
        save(layer, "attended", tokens * q);
        layer.products.push(product(1, tokens, q + 2 * kv, h));
        layer.products.push(product(1, tokens, h, q));
        layer.attention.push(AttentionShape {
            pairs,
            heads: self.heads / share.tensor,
            query_width: width,
            value_width: width,
        });
        let qk_norm = if self.qk_norm.is_some() { 2 } else { 1 };
        layer.streamed_bytes += norm_bytes(local, h) + qk_norm * 2 * tokens * (q + kv) * ELEMENT;
        // The norm, two products, rotary positions, attention.
        layer.operations += 4 + qk_norm;
        layer.backward_bytes = layer.output_bytes + ELEMENT * 2 * tokens * (q + 2 * kv);
        add_tensor(layer, share, tokens * h * ELEMENT);
        if self.qk_norm == Some(QkNorm::Whole) {
            // A mean of the queries and one of the keys for each token, in f32.
            add_sums(layer, share, 2 * tokens * 4);
        }
        self.add_post_norm(layer, local * h);
        let qkv_bias = if self.qkv_bias { q + 2 * kv } else { 0 };
        let biases = qkv_bias + if self.output_bias { h } else { 0 };
        let sinks = if self.sinks {
            self.heads / share.tensor
        } else {
            0
        };
        let norms = sinks
            + self.norms()
            + match self.qk_norm {
                None => 0,
                Some(QkNorm::Heads) => 2 * width,
                Some(QkNorm::Whole) => q + kv,
            };
        block.parameters.dense += h * (2 * q + 2 * kv) + biases + norms;
    }

    /// Adds the scores of so many pairs of a query and a key, and their probabilities.
    pub(super) fn add_scores(&self, block: &mut BlockProfile, share: Share, pairs: u64) {
        let elements = self.heads / share.tensor * pairs;
        let layer = &mut block.layer;
        save(layer, "scores", elements);
        save(layer, "probabilities", elements);
        // The products, the soft cap and the softmax write them.
        layer.streamed_bytes += 6 * elements * ELEMENT;
        layer.operations += 3;
        layer.backward_bytes += 2 * elements * ELEMENT;
    }

    /// Adds an MLP with its norm and residual sum.
    pub(super) fn add_mlp(&self, block: &mut BlockProfile, share: Share, width: u64) {
        let (h, f) = (self.hidden, width / share.tensor);
        let (tokens, local) = (share.tokens, share.tokens / share.sequence);
        let inputs = self.inputs();
        let layer = &mut block.layer;
        save(layer, "MLP input", local * h);
        save(layer, "MLP norm", local * h);
        save(layer, "MLP up", tokens * inputs * f);
        save(layer, "MLP activation", tokens * f);
        layer.products.push(product(1, tokens, inputs * f, h));
        layer.products.push(product(1, tokens, h, f));
        layer.streamed_bytes += norm_bytes(local, h) + (inputs + 1) * tokens * f * ELEMENT;
        // The norm, two products, the activation.
        layer.operations += 4;
        self.add_post_norm(layer, local * h);
        let backward = layer.output_bytes + ELEMENT * tokens * (inputs + 1) * f;
        layer.backward_bytes = layer.backward_bytes.max(backward);
        add_tensor(layer, share, tokens * h * ELEMENT);
        let biases = if self.bias { inputs * f + h } else { 0 };
        block.parameters.dense += (inputs + 1) * h * f + biases + self.norms();
    }

    /// Adds experts with their router, norm and residual sum.
    pub(super) fn add_experts(&self, block: &mut BlockProfile, share: Share, sizes: &Experts) {
        let h = self.hidden;
        // Each tensor rank routes its part of the sequence.
        let routed = share.tokens / share.tensor;
        let local = share.tokens / share.sequence;
        let rows = routed * sizes.per_token * share.expert_tensor;
        let own = sizes.experts / share.expert;
        let f = sizes.width / share.expert_tensor;
        let inputs = self.inputs();
        let layer = &mut block.layer;
        save(layer, "MLP input", local * h);
        save(layer, "MLP norm", local * h);
        save(layer, "scores", 2 * routed * sizes.experts * 4 / ELEMENT);
        save(layer, "rows", rows * h);
        save(layer, "experts up", rows * inputs * f);
        save(layer, "experts activation", rows * f);
        layer.products.push(product(1, routed, sizes.experts, h));
        let each = rows.div_ceil(own);
        layer.products.push(product(own, each, inputs * f, h));
        layer.products.push(product(own, each, h, f));
        // Rows are copied into the order of the experts and back.
        let moved = 4 * rows * h + (inputs + 1) * rows * f;
        layer.streamed_bytes +=
            norm_bytes(local, h) + moved * ELEMENT + 2 * routed * sizes.experts * 4;
        // The norm, three products, the choice, sorting, the rows there and back, the activation.
        layer.operations += 9;
        self.add_post_norm(layer, local * h);
        let backward = layer.output_bytes + ELEMENT * rows * ((inputs + 1) * f + h);
        layer.backward_bytes = layer.backward_bytes.max(backward);
        let exchanges = experts::exchanges(sizes, share, routed, h);
        layer.exchanges.extend(exchanges);
        let biases = if self.bias { own * (inputs * f + h) } else { 0 };
        block.parameters.expert += own * (inputs + 1) * h * f + biases;
        let router_bias = if sizes.router_bias { sizes.experts } else { 0 };
        block.parameters.dense += h * sizes.experts + router_bias + self.norms();
        if sizes.shared_width > 0 {
            let mut shared = BlockProfile::default();
            self.add_mlp(&mut shared, share, sizes.shared_width);
            // Its input and norm are those of the experts.
            shared.layer.saved.drain(..2);
            if self.post_norms {
                // It is the norm of the sum.
                shared.layer.saved.pop();
                shared.layer.operations -= 1;
            }
            block.layer.saved.append(&mut shared.layer.saved);
            block.layer.products.append(&mut shared.layer.products);
            block.layer.operations += shared.layer.operations - 1;
            block.layer.exchanges.append(&mut shared.layer.exchanges);
            block.parameters.dense += shared.parameters.dense - self.norms();
        }
    }

    pub(super) fn embedding(&self, share: Share) -> BlockProfile {
        let (h, local) = (self.hidden, share.tokens / share.sequence);
        let mut layer = LayerProfile {
            streamed_bytes: 2 * share.tokens * h * ELEMENT,
            operations: 1,
            output_bytes: local * h * ELEMENT,
            ..LayerProfile::default()
        };
        let whole = share.tokens * h * ELEMENT;
        let (forward, backward) = match share.sequence {
            1 => (ExchangeKind::AllReduce, None),
            _ => (ExchangeKind::ReduceScatter, Some(ExchangeKind::AllGather)),
        };
        add(
            &mut layer,
            forward,
            Grid::Dense,
            Axis::Tensor,
            share.tensor,
            whole,
            FORWARD,
        );
        if let Some(backward) = backward {
            add(
                &mut layer,
                backward,
                Grid::Dense,
                Axis::Tensor,
                share.tensor,
                whole,
                BACKWARD,
            );
        }
        let dense = h * (self.vocabulary / share.tensor + self.positions);
        BlockProfile {
            layer,
            parameters: GridElements { dense, expert: 0 },
        }
    }

    pub(super) fn output(&self, share: Share) -> BlockProfile {
        let (h, local) = (self.hidden, share.tokens / share.sequence);
        let logits = self.vocabulary / share.tensor;
        let mut layer = LayerProfile {
            products: vec![product(1, share.tokens, logits, h)],
            streamed_bytes: norm_bytes(local, h) + 2 * share.tokens * logits * ELEMENT,
            operations: 3,
            // A chunk of logits and its gradient.
            backward_bytes: share.tokens.min(CHUNK) * logits * 2 * 4,
            ..LayerProfile::default()
        };
        save(&mut layer, "input", local * h);
        save(&mut layer, "norm", local * h);
        if share.sequence > 1 {
            let whole = share.tokens * h * ELEMENT;
            add(
                &mut layer,
                ExchangeKind::AllGather,
                Grid::Dense,
                Axis::Tensor,
                share.tensor,
                whole,
                FORWARD,
            );
            add(
                &mut layer,
                ExchangeKind::ReduceScatter,
                Grid::Dense,
                Axis::Tensor,
                share.tensor,
                whole,
                BACKWARD,
            );
        }
        let dense = h * logits + self.norm();
        BlockProfile {
            layer,
            parameters: GridElements { dense, expert: 0 },
        }
    }

    /// Adds the norm of the output of a branch, if there is one.
    fn add_post_norm(&self, layer: &mut LayerProfile, elements: u64) {
        if self.post_norms {
            save(layer, "norm of the output", elements);
            layer.streamed_bytes += 2 * elements * ELEMENT;
            layer.operations += 1;
        }
    }

    /// Elements of the norms of a branch of the residual stream.
    fn norms(&self) -> u64 {
        let norms = if self.post_norms { 2 } else { 1 };
        norms * self.norm()
    }

    /// Elements of a norm.
    pub(super) fn norm(&self) -> u64 {
        if self.norm_bias {
            2 * self.hidden
        } else {
            self.hidden
        }
    }

    /// Projections into an MLP.
    fn inputs(&self) -> u64 {
        if self.gated { 2 } else { 1 }
    }
}

/// The exchanges of keys and values, in both passes.
pub(super) fn context_exchanges(
    problem: &ExchangeProblem,
    exchange: ContextExchange,
) -> Vec<Exchange> {
    let cost = problem.cost(exchange);
    let ranks = problem.ranks as u64;
    let (kind, factor) = match exchange {
        ContextExchange::Ring | ContextExchange::Hierarchical => (ExchangeKind::SendReceive, 1.0),
        // The whole tensor, of which a rank sends all but its part.
        ContextExchange::AllGather => (ExchangeKind::AllGather, ranks as f64 / (ranks - 1) as f64),
        ContextExchange::AllToAll => (ExchangeKind::AllToAll, ranks as f64 / (ranks - 1) as f64),
    };
    let passes = [(FORWARD, cost.forward), (BACKWARD, cost.backward)];
    let of = |(pass, bytes): (TrainingPass, f64)| Exchange {
        kind,
        grid: Grid::Dense,
        axes: Axis::Context.into(),
        part: GroupPart::Whole,
        ranks,
        bytes: (bytes * factor) as u64,
        pass,
    };
    passes.map(of).into()
}

/// The operations of an exchange on a rank beside those of attention on one: of an all-to-all the split of the heads and the
/// order of the tokens, there and back; of a ring attention to each block and the merge of its result.
pub(super) fn context_operations(exchange: ContextExchange, ranks: u64) -> u64 {
    match exchange {
        ContextExchange::Ring | ContextExchange::Hierarchical => 2 * ranks - 1,
        ContextExchange::AllGather => 1,
        ContextExchange::AllToAll => 4,
    }
}

pub(super) fn save(layer: &mut LayerProfile, name: &str, elements: u64) {
    layer.saved.push(SavedTensor {
        name: name.into(),
        bytes: elements * ELEMENT,
    });
}

pub(super) fn product(batch: u64, m: u64, n: u64, k: u64) -> Product {
    Product { batch, m, n, k }
}

/// Bytes of a norm with the residual sum before it: two tensors read, two written.
pub(super) fn norm_bytes(tokens: u64, hidden: u64) -> u64 {
    4 * tokens * hidden * ELEMENT
}

/// The exchanges around a pair of a column-parallel and a row-parallel layer: with sequence parallelism two all-gathers and
/// reduce-scatters, and one more all-gather in the backward, otherwise a sum in each pass.
fn add_tensor(layer: &mut LayerProfile, share: Share, bytes: u64) {
    let calls: &[_] = match share.sequence {
        1 => &[
            (ExchangeKind::AllReduce, FORWARD),
            (ExchangeKind::AllReduce, BACKWARD),
        ],
        _ => &[
            (ExchangeKind::AllGather, FORWARD),
            (ExchangeKind::ReduceScatter, FORWARD),
            (ExchangeKind::AllGather, BACKWARD),
            (ExchangeKind::AllGather, BACKWARD),
            (ExchangeKind::ReduceScatter, BACKWARD),
        ],
    };
    for (kind, pass) in calls {
        add(
            layer,
            *kind,
            Grid::Dense,
            Axis::Tensor,
            share.tensor,
            bytes,
            *pass,
        );
    }
}

/// A sum over the tensor ranks in each pass.
fn add_sums(layer: &mut LayerProfile, share: Share, bytes: u64) {
    for pass in [FORWARD, BACKWARD] {
        add(
            layer,
            ExchangeKind::AllReduce,
            Grid::Dense,
            Axis::Tensor,
            share.tensor,
            bytes,
            pass,
        );
    }
}

pub(super) fn add(
    layer: &mut LayerProfile,
    kind: ExchangeKind,
    grid: Grid,
    axis: Axis,
    ranks: u64,
    bytes: u64,
    pass: TrainingPass,
) {
    if ranks > 1 {
        let axes = AxisSet::of(axis);
        layer.exchanges.push(Exchange {
            kind,
            grid,
            axes,
            part: GroupPart::Whole,
            ranks,
            bytes,
            pass,
        });
    }
}
