//! The profile of a decoder-only transformer by formulas: GPT, Llama, and models with experts in the place of MLPs.
//!
//! Activations are those of flash attention and fused norms and activations in 16 bits, without dropout (Korthikanti et al.
//! 2022, arXiv:2205.05198, section 4, for gated MLPs and grouped queries): per token and layer
//! `8 h + 4 q + 4 kv + 6 f` bytes.

mod block;
mod experts;
mod further;
mod latent;

use burn_megatron::kernels::attention::Heads;
use burn_megatron::mesh::{ContextExchange, Mesh, ParallelConfig};
use burn_megatron::nn::QkNorm;
use burn_megatron::nn::context::ExchangeProblem;
use burn_megatron::nn::moe::{DispatchNodes, DispatcherKind, ExpertGroups, Fp8DispatchScales};

use super::flops::keys_per_query;
use super::model_profile::{BlockProfile, ModelProfile};

pub use latent::LatentWidths;

/// The sizes of a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct Decoder {
    /// Width of the residual stream.
    pub hidden: u64,
    /// Layers.
    pub layers: usize,
    /// Query heads.
    pub heads: u64,
    /// Groups of keys and values.
    pub groups: u64,
    /// Width of a head.
    pub head_width: u64,
    /// Width of an MLP.
    pub mlp_width: u64,
    /// Whether the activation is gated.
    pub gated: bool,
    /// Whether linear layers have biases.
    pub bias: bool,
    /// Whether the query, key and value projections have.
    pub qkv_bias: bool,
    /// Whether the output projection of attention has a bias.
    pub output_bias: bool,
    /// Whether norms have biases.
    pub norm_bias: bool,
    /// Whether attention has its scores in memory, and the probabilities.
    pub holds_scores: bool,
    /// The norm of queries and keys.
    pub qk_norm: Option<QkNorm>,
    /// Logits, padding included.
    pub vocabulary: u64,
    /// Whether the output is tied to the embedding.
    pub tied: bool,
    /// Whether each head has a sink.
    pub sinks: bool,
    /// Whether the outputs of attention and MLP are normalised.
    pub post_norms: bool,
    /// Learned positions.
    pub positions: u64,
    /// Latent attention: each head has keys and values of its own, and `head_width` is that of queries and keys.
    pub latent: Option<LatentWidths>,
    /// The window of attention of each layer.
    pub windows: Vec<Option<usize>>,
    /// Experts in the place of MLPs.
    pub experts: Option<Experts>,
    /// Depths of multi-token prediction.
    pub mtp: u64,
}

/// The experts of a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct Experts {
    /// Their number.
    pub experts: u64,
    /// The experts of a token.
    pub per_token: u64,
    /// The groups that a token chooses them from.
    pub groups: Option<ExpertGroups>,
    /// Width of one.
    pub width: u64,
    /// Width of the MLP for every token beside them; 0 for none.
    pub shared_width: u64,
    /// Whether the router has a bias.
    pub router_bias: bool,
    /// Whether a layer has experts.
    pub layers: Vec<bool>,
    /// The exchange of tokens with the experts.
    pub dispatcher: DispatcherKind,
    /// Whether they do in 8 bits.
    pub fp8_dispatch: Option<Fp8DispatchScales>,
}

/// The window and the experts of a layer.
type LayerKind<'a> = (Option<usize>, Option<&'a Experts>);

/// The split of a micro-batch on a rank.
#[derive(Clone, Copy, Debug)]
struct Share {
    /// Tokens of the micro-batch on the ranks of the tensor axis together.
    tokens: u64,
    tensor: u64,
    context: u64,
    /// By how much the residual stream is split along the sequence.
    sequence: u64,
    expert: u64,
    expert_tensor: u64,
    /// The nodes of the ranks that exchange tokens of experts.
    nodes: Option<DispatchNodes>,
}

impl Decoder {
    /// The profile of a rank, for micro-batches of `samples` sequences of `seq` tokens.
    pub fn profile(&self, layout: &ParallelConfig, samples: usize, seq: usize) -> ModelProfile {
        let context = layout.context as u64;
        let tensor = layout.tensor as u64;
        let tokens = (samples * seq) as u64;
        let share = Share {
            tokens: tokens / context,
            tensor,
            context,
            sequence: if layout.sequence_parallel { tensor } else { 1 },
            expert: layout.expert as u64,
            expert_tensor: layout.expert_tensor_size() as u64,
            nodes: self.nodes(layout),
        };
        let context_exchange = self.context_exchange(layout, [samples, seq]);
        let attention = |block: &mut BlockProfile, window| {
            let pairs = (tokens as f64 * keys_per_query(seq, window)) as u64 / context;
            if let Some(latent) = self.latent {
                return self.add_latent_attention(block, share, pairs, latent);
            }
            self.add_attention(block, share, pairs);
            if self.holds_scores {
                // With those that are hidden.
                self.add_scores(block, share, tokens * seq as u64 / context);
            }
            if let Some((problem, exchange)) = &context_exchange {
                let exchanges = block::context_exchanges(problem, *exchange);
                block.layer.exchanges.extend(exchanges);
                block.layer.operations += block::context_operations(*exchange, context);
            }
        };
        let (layers, kinds) = self.kinds();
        let profile = |(window, experts): LayerKind<'_>| {
            let mut block = BlockProfile::default();
            attention(&mut block, window);
            match experts {
                Some(sizes) => self.add_experts(&mut block, share, sizes),
                None => self.add_mlp(&mut block, share, self.mlp_width),
            }
            block
        };
        let mut model = ModelProfile {
            embedding: self.embedding(share),
            layers,
            kinds: kinds.into_iter().map(profile).collect(),
            output: self.output(share),
            tied: if self.tied {
                self.vocabulary * self.hidden / tensor
            } else {
                0
            },
        };
        self.add_further(&mut model, share);
        model
    }

    /// The nodes that the experts' ranks are on, where the layout says which ranks share one.
    fn nodes(&self, layout: &ParallelConfig) -> Option<DispatchNodes> {
        let experts = self.experts.as_ref()?;
        layout.ranks_per_node?;
        let mesh = Mesh::new(layout, layout.world_size()?).ok()?;
        DispatchNodes::of(&mesh, experts.experts as usize)
    }

    /// The kind of each layer, and the window and the experts of each kind.
    fn kinds(&self) -> (Vec<usize>, Vec<LayerKind<'_>>) {
        let mut kinds = vec![];
        let layers = (0..self.layers).map(|layer| {
            let experts = self.experts.as_ref().filter(|sizes| sizes.layers[layer]);
            let kind = (self.windows[layer], experts);
            kinds
                .iter()
                .position(|known| *known == kind)
                .unwrap_or_else(|| {
                    kinds.push(kind);
                    kinds.len() - 1
                })
        });
        (layers.collect(), kinds)
    }

    /// The exchange over the context axis, chosen for one sequence as a model does, and its size.
    fn context_exchange(
        &self,
        layout: &ParallelConfig,
        [samples, seq]: [usize; 2],
    ) -> Option<(ExchangeProblem, ContextExchange)> {
        if layout.context == 1 {
            return None;
        }
        let heads = Heads {
            heads: self.heads as usize / layout.tensor,
            groups: (self.groups as usize / layout.tensor).max(1),
            width: self.head_width as usize,
        };
        let one = ExchangeProblem::of_layout(layout, heads, seq, 2);
        let exchange = one.resolve(layout.context_exchange, true);
        let all = ExchangeProblem::of_layout(layout, heads, samples * seq, 2);
        Some((all, exchange.unwrap_or(ContextExchange::AllGather)))
    }
}

#[cfg(test)]
pub(crate) mod tests;
