//! Formulas from which the planner estimates the cost of a transformer on one rank.
//!
//! Each part of a layer has a file, which computes its FLOPs and its profile: matrix multiplications, saved activations
//! and communication. The formulas assume flash attention, fused norms, 16-bit activations and no dropout. They follow
//! Korthikanti et al. 2022, arXiv:2205.05198, section 4, and extend it to gated MLPs and grouped-query attention. Saved
//! activations take `8 h + 4 q + 4 kv + 6 f` bytes per token and layer. `h` is the hidden size, `q` is the width of all
//! query heads, `kv` is the width of all key heads, and `f` is the inner width of the MLP.

mod attention;
mod dispatch;
mod ends;
mod feed_forward;
mod flops;
mod latent;

use burn_megatron::collective::ExchangeKind;
use burn_megatron::mesh::{Axis, ParallelConfig};
use burn_megatron::model::ModelConfig;
use burn_megatron::nn::{NormConfig, NormKind};
use burn_megatron_plan::profile::{ELEMENT, LayerProfile, TrainingPass};
use burn_megatron_plan::{BlockProfile, ModelProfile};

use crate::{FeedForwardSpec, LayerSpec, MixerSpec, TransformerConfig};

pub(crate) use flops::flops_per_token;

/// The part of a micro-batch that a rank of a layout computes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RankShare<'a> {
    pub layout: &'a ParallelConfig,
    /// The number of sequences in the micro-batch.
    pub samples: usize,
    /// The number of tokens per sequence.
    pub seq: usize,
}

impl RankShare<'_> {
    fn tensor(&self) -> u64 {
        self.layout.tensor as u64
    }

    fn context(&self) -> u64 {
        self.layout.context as u64
    }

    /// Returns the number of parts into which sequence parallelism splits the residual stream.
    fn sequence(&self) -> u64 {
        match self.layout.sequence_parallel {
            true => self.tensor(),
            false => 1,
        }
    }

    /// Returns the number of tokens on all ranks of the context axis together.
    fn all_tokens(&self) -> u64 {
        (self.samples * self.seq) as u64
    }

    /// Returns the number of tokens on all ranks of the tensor axis together.
    fn tokens(&self) -> u64 {
        self.all_tokens() / self.context()
    }

    /// Returns the number of tokens in the residual stream on this rank.
    fn stream(&self) -> u64 {
        self.tokens() / self.sequence()
    }

    /// Adds collectives over the tensor axis.
    fn exchange(
        &self,
        layer: &mut LayerProfile,
        bytes: u64,
        calls: &[(ExchangeKind, TrainingPass)],
    ) {
        for (kind, pass) in calls {
            layer.exchange(*kind, Axis::Tensor, self.tensor(), bytes, *pass);
        }
    }

    /// Adds the collectives of a column-parallel layer and the following row-parallel layer. With sequence parallelism,
    /// these are two all-gathers and two reduce-scatters, and another all-gather in the backward. Otherwise, these are
    /// one all-reduce in the forward and one in the backward.
    fn exchange_pair(&self, layer: &mut LayerProfile, bytes: u64) {
        use ExchangeKind::{AllGather, AllReduce, ReduceScatter};
        use TrainingPass::{Backward, Forward};
        let calls: &[_] = match self.sequence() {
            1 => &[(AllReduce, Forward), (AllReduce, Backward)],
            _ => &[
                (AllGather, Forward),
                (ReduceScatter, Forward),
                (AllGather, Backward),
                (AllGather, Backward),
                (ReduceScatter, Backward),
            ],
        };
        self.exchange(layer, bytes, calls);
    }
}

impl TransformerConfig {
    /// Returns the profile of the model on a rank, for micro-batches of `samples` sequences of `seq` tokens.
    pub fn profile(&self, layout: &ParallelConfig, samples: usize, seq: usize) -> ModelProfile {
        let share = RankShare {
            layout,
            samples,
            seq,
        };
        let (mut kinds, mut known) = (vec![], vec![]);
        let layers = (0..self.layers).map(|number| {
            let kind = self.layer_kind(number);
            let position = known.iter().position(|known| *known == kind);
            position.unwrap_or_else(|| {
                known.push(kind);
                kinds.push(self.layer(number).profile(&share));
                kinds.len() - 1
            })
        });
        let mut model = ModelProfile {
            layers: layers.collect(),
            embedding: ends::embedding(self, &share),
            output: ends::output(self, &share),
            tied: match self.tied {
                true => ends::vocabulary_weights(self, &share),
                false => 0,
            },
            kinds,
        };
        ends::add_further(self, &mut model, &share);
        model
    }
}

impl LayerSpec {
    fn profile(&self, share: &RankShare<'_>) -> BlockProfile {
        let mut block = BlockProfile::default();
        block.layer.output_bytes = ELEMENT * share.stream() * self.norm.hidden as u64;
        self.add_norm(&mut block, share, ["input", "attention norm"]);
        block.add(&match &self.mixer {
            MixerSpec::Attention(config) => attention::profile(config, share),
            MixerSpec::Latent(config) => latent::profile(config, share),
        });
        self.add_norm(&mut block, share, ["MLP input", "MLP norm"]);
        block.add(&match &self.feed_forward {
            FeedForwardSpec::Dense(config) => feed_forward::dense(config, share),
            FeedForwardSpec::Experts(config) => feed_forward::experts(config, share),
        });
        block
    }

    /// Adds the norms of a part, including the residual additions.
    fn add_norm(&self, block: &mut BlockProfile, share: &RankShare<'_>, names: [&str; 2]) {
        let (elements, layer) = (share.stream() * self.norm.hidden as u64, &mut block.layer);
        for name in names {
            layer.save(name, elements);
        }
        layer.streamed_bytes += norm_bytes(elements);
        layer.operations += 1;
        block.parameters.dense += norm_elements(&self.norm);
        if self.post_norms {
            layer.save("norm of the output", elements);
            layer.streamed_bytes += 2 * elements * ELEMENT;
            layer.operations += 1;
            block.parameters.dense += norm_elements(&self.norm);
        }
    }
}

/// Returns the number of parameters of a norm.
fn norm_elements(norm: &NormConfig) -> u64 {
    let parameters = match norm.kind {
        NormKind::Layer => 2,
        NormKind::Rms => 1,
    };
    parameters * norm.hidden as u64
}

/// Returns the number of bytes that a norm of `elements` elements and the preceding residual addition read and write.
/// Each of them reads and writes two tensors.
fn norm_bytes(elements: u64) -> u64 {
    4 * elements * ELEMENT
}
