//! A decoder with one attention layer, in which a fault of context parallelism can be injected.

use std::sync::Arc;

use crate::Subject;
use crate::subject::integers;
use burn::module::Module;
use burn::tensor::{DType, Device, Int, Tensor};
use burn_megatron::collective::{CollectiveOp, Comm, start};
use burn_megatron::comm::{ParallelContext, ReduceOp};
use burn_megatron::mesh::ContextSplit;
use burn_megatron::model::RecomputePrefix;
use burn_megatron::model::{LanguageModel, Tokens};
use burn_megatron::nn::Losses;
use burn_megatron::nn::context::{
    KeyValueExchange, OuterGroup, PartialAttention, PartialGradients, PartialResult, Ring, merge,
};
use burn_megatron::nn::{
    BatchFormat, BuildError, Init, LearnedPositions, LearnedPositionsConfig, ModelBuilder,
    OutputLayer, OutputLayerConfig, ParallelAttention, ParallelAttentionConfig, ParallelModule,
    VocabParallelCrossEntropy, VocabParallelEmbedding, VocabParallelEmbeddingConfig, Vocabulary,
};
use burn_megatron_data::{DataError, Sample, Samples};
use burn_megatron_kernels::philox::Stream;

/// A fault of context parallelism. It has no effect on a single rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContextFault {
    /// Ring attention adds the results of the blocks without rescaling them.
    MergedWithoutRescaling,
    /// The summed gradients of keys and values are not sent back to the rank that owns the keys and values. They stay
    /// on the last rank that added to them.
    GradientsOneHopShort,
    /// Each rank uses positions that start from 0 for its shard of the sequence.
    LocalPositions,
    /// The loss is averaged over the tokens of each rank, and then over the ranks.
    LossPerRank,
    /// The targets of each rank are the next tokens within its shard, instead of the next tokens within the whole
    /// sequence.
    TargetsOfThePart,
    /// Each rank attends only to its own keys, as if its process group had one rank.
    GroupOfOne,
}

/// A ring of context-parallel ranks with a fault.
#[derive(Debug)]
struct FaultyRing {
    ring: Ring,
    fault: ContextFault,
}

impl FaultyRing {
    fn comm(&self) -> &Comm {
        &self.ring.0.comm
    }

    /// Sends `x` to the next rank, or to the previous rank if `back` is set.
    fn shift(&self, x: Tensor<3>, back: bool) -> Tensor<3> {
        let (rank, size, rows) = (self.comm().rank(), self.comm().size(), x.dims()[0]);
        let only = |peer: usize| {
            let mut counts = vec![0; size];
            counts[peer % size] = rows;
            counts
        };
        let (next, previous) = (only(rank + 1), only(rank + size - 1));
        let (send, receive) = if back {
            (previous, next)
        } else {
            (next, previous)
        };
        start(x, &CollectiveOp::AllToAll { send, receive }, self.comm()).wait()
    }
}

impl KeyValueExchange for FaultyRing {
    fn forward(&self, of: &PartialAttention, q: Tensor<4>, own: Tensor<3>) -> PartialResult {
        if self.fault == ContextFault::GroupOfOne {
            let keys = self.ring.0.members(self.comm().rank());
            let result = of.attend(&q, &own, keys);
            return result.expect("a query attends to its own token");
        }
        if self.fault != ContextFault::MergedWithoutRescaling {
            return self.ring.forward(of, q, own);
        }
        let (rank, size) = (self.comm().rank(), self.comm().size());
        let (mut block, mut sum) = (own, None);
        for step in 0..size {
            let keys = self.ring.0.members((rank + size - step) % size);
            if let Some((out, lse)) = of.attend(&q, &block, keys) {
                sum = Some(match sum {
                    None => (out, lse),
                    Some((before, before_lse)) => {
                        let of_lse = |lse| (out.zeros_like(), lse);
                        let (_, merged) = merge(of_lse(before_lse), of_lse(lse));
                        (before + out, merged)
                    }
                });
            }
            block = self.shift(block, false);
        }
        sum.expect("a query attends to its own token")
    }

    fn backward(
        &self,
        of: &PartialAttention,
        q: Tensor<4>,
        own: Tensor<3>,
        result: PartialResult,
        dout: Tensor<4>,
    ) -> PartialGradients {
        let shape = own.dims();
        if self.fault == ContextFault::GroupOfOne {
            let keys = self.ring.0.members(self.comm().rank());
            let of_own = of.gradients(&q, &own, keys, &result, &dout);
            return of_own.expect("a query attends to its own token");
        }
        let (dq, block) =
            self.ring
                .backward(of, q.clone(), own.clone(), result.clone(), dout.clone());
        if self.fault != ContextFault::GradientsOneHopShort {
            return (dq, block);
        }
        let rank = self.comm().rank();
        let keys = self.ring.0.members(rank);
        let of_own = of.gradients(&q, &own, keys, &result, &dout);
        let (_, of_own) = of_own.expect("a query attends to its own token");
        // The last gradients to arrive came from the previous rank.
        let of_others = self.shift(block - of_own.clone(), true);
        assert_eq!(of_others.dims(), shape);
        (dq, of_own + of_others)
    }
}

/// A model with one attention layer between an embedding and an output layer.
#[derive(Module, Debug)]
pub struct ContextDecoder {
    embedding: VocabParallelEmbedding,
    positions: LearnedPositions,
    attention: ParallelAttention,
    output: OutputLayer,
    #[module(skip)]
    loss: VocabParallelCrossEntropy,
    #[module(skip)]
    context: Comm,
    #[module(skip)]
    fault: Option<ContextFault>,
}

const HIDDEN: usize = 8;
const SEQ: usize = 16;
const TOKENS: usize = 13;
const SAMPLES: usize = 2;
const IGNORE: i64 = -1;

impl ContextDecoder {
    fn new(fault: Option<ContextFault>, scope: &ModelBuilder) -> Result<Self, BuildError> {
        let init = Init::Normal(0.4);
        let vocabulary = Vocabulary::padded(TOKENS, 1, 1);
        let comm = scope.groups().tensor().clone();
        let attention = ParallelAttentionConfig::new(HIDDEN, 4, 2, 4)
            .with_bias(false)
            .with_qkv_bias(false)
            .with_init(init)
            .with_output_init(init)
            .init(&scope.child("attention"))?;
        Ok(Self {
            embedding: VocabParallelEmbeddingConfig::new(vocabulary, HIDDEN)
                .with_init(init)
                .init(&scope.child("embedding"))?,
            positions: LearnedPositionsConfig::new(SEQ, HIDDEN)
                .with_init(init)
                .init(&scope.child("positions")),
            attention: match fault {
                Some(fault) => attention.with_exchange(|group: OuterGroup| {
                    Arc::new(FaultyRing {
                        ring: Ring(group),
                        fault,
                    })
                }),
                None => attention,
            },
            output: OutputLayerConfig::new(vocabulary, HIDDEN)
                .with_init(init)
                .init(&scope.child("output"))?,
            loss: VocabParallelCrossEntropy::new(vocabulary, &comm).with_ignore(Some(IGNORE)),
            context: scope.groups().context().clone(),
            fault,
        })
    }
}

impl LanguageModel for ContextDecoder {
    type Cache = RecomputePrefix;

    fn hidden(&self, _: usize, _: Option<Tensor<3>>, tokens: Tokens) -> Tensor<3> {
        let mut format = tokens.format();
        let x = self.embedding.forward(tokens);
        let positions = match self.fault {
            Some(ContextFault::LocalPositions) => &BatchFormat::Rows,
            _ => &format,
        };
        let x = self.positions.forward_with_format(x, positions);
        x.clone()
            + self
                .attention
                .forward_with_context(x, None, format.layer(0))
    }

    fn losses_of(&self, hidden: Tensor<3>, targets: Tensor<2, Int>) -> Losses {
        let logits = self.output.forward(hidden, &self.embedding);
        let own = targets.clone().not_equal_elem(IGNORE).int().sum();
        let mut losses = self.loss.losses(logits, targets);
        if self.fault == Some(ContextFault::LossPerRank) {
            // The value is scaled so that its sum over the ranks, divided by the number of tokens of all ranks, is the
            // mean of the per-rank means.
            let own = own.into_scalar::<f64>();
            let all = self.context.all_reduce_scalar(own, ReduceOp::Sum).unwrap();
            let mean = all / self.context.size() as f64;
            losses.objective = losses.objective.mul_scalar(mean / own);
        }
        losses
    }

    fn logits_of(&self, _: Tensor<3>) -> Tensor<3> {
        unreachable!("verify does not generate")
    }

    fn vocabulary(&self) -> usize {
        TOKENS
    }

    fn context(&self) -> usize {
        SEQ
    }

    fn flops_per_token(&self, seq: usize) -> f64 {
        // The weights are the projections to 16 query, 8 key and 8 value features, the projection of the 16 output
        // features, and the output layer. For attention, only causal query-key pairs are counted.
        let weights = HIDDEN * (16 + 8 + 8 + 16 + TOKENS);
        (6 * weights + 6 * 16 * seq) as f64
    }
}

/// A [`Subject`] with a [`ContextDecoder`], two samples of 16 tokens, and an optional fault.
#[derive(Clone, Copy, Debug)]
pub struct ContextSubject(pub Option<ContextFault>);

/// Samples whose targets are the next tokens. The first two positions have no target.
struct FaultySamples {
    /// The positions of this rank's shard of the sequence, if the targets are the next tokens within the shard.
    own: Option<Vec<usize>>,
}

impl Samples for FaultySamples {
    fn seq(&self) -> usize {
        SEQ
    }

    fn sample(&self, number: u64) -> Result<Sample, DataError> {
        let mut tokens = integers(&Stream::new(1, number), 0, SEQ + 1, TOKENS);
        let mut targets = tokens[1..].to_vec();
        for pair in self.own.iter().flat_map(|own| own.windows(2)) {
            targets[pair[0]] = tokens[pair[1]];
        }
        targets[..2].fill(IGNORE as i32);
        tokens.truncate(SEQ);
        Ok(Sample {
            tokens,
            targets,
            documents: vec![],
            padding: 0,
        })
    }
}

impl Subject for ContextSubject {
    type Model = ContextDecoder;

    fn build(
        &self,
        groups: &ParallelContext,
        device: &Device,
    ) -> Result<ParallelModule<ContextDecoder>, BuildError> {
        let scope = ModelBuilder::with(groups, device, 3, DType::F64);
        let decoder = ContextDecoder::new(self.0, &scope)?;
        scope.finish(decoder)
    }

    fn samples(&self) -> usize {
        SAMPLES
    }

    fn data(&self, groups: &ParallelContext) -> Arc<dyn Samples> {
        let context = groups.context();
        let is_local = self.0 == Some(ContextFault::TargetsOfThePart);
        let own = is_local.then(|| {
            let split = ContextSplit::Zigzag;
            split
                .tokens(&[SEQ], context.rank(), context.size())
                .unwrap()
        });
        Arc::new(FaultySamples { own })
    }
}
