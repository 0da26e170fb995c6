//! A small decoder in which a fault can be injected that `verify` must detect.

use std::sync::Arc;

use crate::subject::integers;
use crate::{Layout, Rounding, Subject};
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, Device, Int, Tensor};
use burn_megatron::collective::{self, Comm, from_buffer, to_buffer};
use burn_megatron::comm::{ParallelContext, ReduceOp};
use burn_megatron::data_parallel::{
    DataParallelConfig, DataParallelError, DistributedDataParallel,
};
use burn_megatron::mesh::Axis;
use burn_megatron::model::{LanguageModel, Tokens};
use burn_megatron::model::{RecomputePrefix, RoundingSizes};
use burn_megatron::nn::Losses;
use burn_megatron::nn::fp8::{Fp8Config, Fp8Recipe};
use burn_megatron::nn::{
    Activation, ActivationLayout, BuildError, ColumnParallelLinear, ColumnParallelLinearConfig,
    Dropout, Init, LearnedPositions, LearnedPositionsConfig, LinearInput, ModelBuilder, Norm,
    NormConfig, NormKind, OutputLayer, OutputLayerConfig, ParallelAttention,
    ParallelAttentionConfig, ParallelModule, ParameterEntry, Placement, RowParallelLinear,
    RowParallelLinearConfig, SEQUENCE_DIM, Section, VocabParallelCrossEntropy,
    VocabParallelEmbedding, VocabParallelEmbeddingConfig, Vocabulary,
};
use burn_megatron_data::{DataError, Sample, Samples};
use burn_megatron_kernels::philox::Stream;

use super::corrupted::{CorruptedComm, Corruption, DRIFT};
use super::replacing::Replacing;

/// A fault of tensor, sequence or data parallelism, or of micro-batches. It has no effect on a single rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The gradient of the input of a column-parallel layer is not summed over the tensor-parallel ranks.
    NoBackwardSum,
    /// The output of a row-parallel layer is not summed over the tensor-parallel ranks.
    NoForwardSum,
    /// The gradient of the embedding, which is already complete on every rank, is summed over the ranks again.
    SummedTwice,
    /// The bias of a row-parallel layer is added on every rank before the outputs are summed.
    BiasBeforeSum,
    /// With sequence parallelism, the gradient of a norm is not summed over the tensor-parallel ranks.
    NormNotSummed,
    /// Keys and values are replicated on two ranks, but their gradient contains the contribution of only one of these
    /// ranks.
    SharedNotSummed,
    /// A replicated parameter is declared as sharded, so the gradient norm includes its gradient once per rank.
    CountedTwice,
    /// Each rank computes the gradient norm only over the gradients that it holds.
    LocalNorm,
    /// Each rank initializes its shard of a parameter with the values of the first shard.
    OneSeed,
    /// Each rank draws a different dropout mask for a replicated activation.
    MaskPerRank,
    /// With sequence parallelism, each rank draws the dropout mask of the first shard of the sequence.
    MaskOfFirstPart,
    /// With sequence parallelism, each rank uses the positions of the first shard of the sequence.
    PositionsOfFirstPart,
    /// One data-parallel rank starts from slightly different weights.
    OwnWeights,
    /// Gradients are not summed over the data-parallel ranks.
    NoDataSum,
    /// All data-parallel ranks read the samples of the first rank.
    SameSamples,
    /// The loss is averaged over the tokens of each data-parallel rank, and then over the ranks.
    MeanOfMeans,
    /// The loss is averaged over the tokens of each micro-batch, and then over the micro-batches.
    MeanOfMicroBatches,
    /// The loss is averaged over the tokens of each micro-batch, and then summed over the micro-batches.
    SumOfMicroBatches,
    /// Label smoothing uses the mean of the logits over the rank's shard of the vocabulary, instead of the whole
    /// vocabulary.
    LocalSmoothing,
    /// One data-parallel rank gets slightly different gradients.
    Drift,
    /// The matrix multiplication epilogue that computes the gradient of a bias overwrites the gradient of the previous
    /// micro-batch. Requires [`FaultySubject::epilogues`].
    BiasGradientReplaced,
    /// A gradient buffer, which keeps its address for CUDA graphs, is not cleared before the next step.
    NotCleared,
    /// A column-parallel layer with ring overlap uses its own chunk instead of the chunk of its neighbor.
    ChunkDropped,
    /// A column-parallel layer uses the chunks of an all-gather in the wrong order.
    ChunksOutOfOrder,
}

/// The model of [`FaultySubject`]: a decoder with one block, which contains every kind of parallel layer.
#[derive(Module, Debug)]
pub struct Decoder {
    embedding: VocabParallelEmbedding,
    positions: LearnedPositions,
    norm: Norm,
    attention: ParallelAttention,
    dropout: Dropout,
    mlp_norm: Norm,
    up: ColumnParallelLinear,
    down: RowParallelLinear,
    output: OutputLayer,
    #[module(skip)]
    loss: VocabParallelCrossEntropy,
    #[module(skip)]
    comm: Comm,
    #[module(skip)]
    data: Comm,
    #[module(skip)]
    layout: ActivationLayout,
    #[module(skip)]
    epilogues: bool,
    #[module(skip)]
    fault: Option<Fault>,
}

const HIDDEN: usize = 8;
const SEQ: usize = 8;
const HEADS: usize = 4;
const GROUPS: usize = 2;
const WIDTH: usize = 12;
/// The vocabulary size. It is not a multiple of 2, so that the shard of the last rank is padded.
const TOKENS: usize = 13;
const IGNORE: i64 = -1;
const SAMPLES: usize = 4;
/// The number of targets of all samples of a step: 1 + 3 + 5 + 7.
const TARGETS: usize = SAMPLES * SAMPLES;

impl Decoder {
    fn new(
        FaultySubject {
            fault, epilogues, ..
        }: FaultySubject,
        scope: &ModelBuilder,
    ) -> Result<Self, BuildError> {
        let sp = scope.sequence_parallel();
        let (place, init) = (scope.place(), Init::Normal(0.3));
        let vocabulary = Vocabulary::padded(TOKENS, 1, place.size);
        let comm = scope.groups().tensor().clone();
        let attention = ParallelAttentionConfig {
            hidden: HIDDEN,
            heads: HEADS,
            groups: GROUPS,
            head_width: HIDDEN / HEADS,
            // The gradient of a key bias is zero except for rounding, which AdamW would amplify.
            bias: false,
            qkv_bias: false,
            qk_norm: None,
            window: None,
            sinks: false,
            scale: None,
            soft_cap: None,
            dropout: 0.1,
            sequence: SEQ,
            init,
            output_init: init,
        };
        let first_positions = fault == Some(Fault::PositionsOfFirstPart);
        // Returns the scope of a layer whose communicator calls are corrupted by the fault.
        let corrupted = |name: &str, faults: &[(Fault, Corruption)]| {
            let (scope, groups) = (scope.child(name), scope.groups().clone());
            let of_fault = faults.iter().find(|(of, _)| fault == Some(*of));
            match of_fault {
                Some((_, how)) => {
                    scope.with_groups(groups.with_tensor(CorruptedComm::wrap(&comm, *how)))
                }
                None => scope,
            }
        };
        let of_up = [
            (Fault::NoBackwardSum, Corruption::Skip),
            (Fault::ChunkDropped, Corruption::OwnChunk),
            (Fault::ChunksOutOfOrder, Corruption::PreviousChunk),
        ];
        let of_down = [(Fault::NoForwardSum, Corruption::Skip)];
        let stream = match fault {
            Some(Fault::MaskPerRank) => format!("dropout{}", place.index),
            _ => "dropout0".into(),
        };
        let (child, rms) = (|name: &str| scope.child(name), NormKind::Rms);
        Ok(Self {
            embedding: VocabParallelEmbeddingConfig::new(vocabulary, HIDDEN)
                .with_init(init)
                .init(&child("embedding"))?,
            positions: {
                let scope = child("positions").with_sequence_parallel(sp && !first_positions);
                LearnedPositionsConfig::new(SEQ, HIDDEN)
                    .with_init(init)
                    .init(&scope)
            },
            norm: NormConfig::new(rms, HIDDEN, 1e-5).init(&child("norm")),
            attention: attention.init(&child("attention"))?,
            dropout: Dropout::new(0.2, &child(&stream))?,
            mlp_norm: NormConfig::new(NormKind::Layer, HIDDEN, 1e-5).init(&child("mlp_norm")),
            up: ColumnParallelLinearConfig::new(HIDDEN, WIDTH)
                .with_init(init)
                .init(&corrupted("up", &of_up))?,
            down: RowParallelLinearConfig::new(WIDTH, HIDDEN)
                .with_init(init)
                .init(&corrupted("down", &of_down))?,
            output: OutputLayerConfig::new(vocabulary, HIDDEN)
                .with_init(init)
                .init(&child("output"))?,
            loss: VocabParallelCrossEntropy::new(vocabulary, &comm).with_ignore(Some(IGNORE)),
            comm,
            data: scope.groups().data().clone(),
            layout: if sp && fault != Some(Fault::MaskOfFirstPart) {
                ActivationLayout::SplitAlong {
                    dim: SEQUENCE_DIM,
                    place,
                }
            } else {
                ActivationLayout::Whole
            },
            epilogues,
            fault,
        })
    }

    /// Returns the GELU of the first linear layer of the MLP.
    fn activated(&self, x: Tensor<3>) -> LinearInput {
        if !self.epilogues {
            return Activation::GeluTanh.forward(self.up.forward(x)).into();
        }
        let gelu = self.up.forward_to_gelu(x);
        LinearInput::Gelu(match self.fault {
            Some(Fault::BiasGradientReplaced) => gelu.map_bias_destination(Replacing::wrap),
            _ => gelu,
        })
    }

    fn down(&self, x: LinearInput) -> Tensor<3> {
        match (self.down.forward_without_bias(x), self.fault) {
            ((y, Some(bias)), Some(Fault::BiasBeforeSum)) => {
                y + bias
                    .into_tensor()
                    .mul_scalar(self.comm.size() as f64)
                    .unsqueeze()
            }
            ((y, Some(bias)), _) => y + bias.into_tensor().unsqueeze(),
            ((y, None), _) => y,
        }
    }
}

impl LanguageModel for Decoder {
    type Cache = RecomputePrefix;

    fn hidden(&self, _: usize, _: Option<Tensor<3>>, tokens: Tokens) -> Tensor<3> {
        let x = self.embedding.forward(tokens);
        let x = match self.fault {
            Some(Fault::SummedTwice) => collective::copy(x, &self.comm),
            _ => x,
        };
        let x = self.positions.forward(x);
        let attended = self.attention.forward(self.norm.forward(x.clone()), None);
        let x = x + self.dropout.forward(attended, self.layout);
        let up = self.mlp_norm.forward(x.clone());
        x + self.down(self.activated(up))
    }

    fn losses_of(&self, hidden: Tensor<3>, targets: Tensor<2, Int>) -> Losses {
        let logits = self.output.forward(hidden, &self.embedding);
        let is_target = targets.clone().not_equal_elem(IGNORE);
        let rows = targets.dims()[0];
        let mut losses = self.loss.losses(logits.clone(), targets);
        let own = || is_target.clone().int().sum().into_scalar::<f64>();
        let factor = match self.fault {
            Some(Fault::MeanOfMeans) => {
                // The value is scaled so that its sum over the ranks, divided by the number of tokens of all ranks, is
                // the mean of the per-rank means.
                let own = own();
                let all = self.data.all_reduce_scalar(own, ReduceOp::Sum).unwrap();
                all / self.data.size() as f64 / own
            }
            Some(Fault::MeanOfMicroBatches) => (TARGETS * rows / SAMPLES) as f64 / own(),
            Some(Fault::SumOfMicroBatches) => TARGETS as f64 / own(),
            _ => 1.0,
        };
        if factor != 1.0 {
            losses.objective = losses.objective.mul_scalar(factor);
        }
        if self.fault == Some(Fault::LocalSmoothing) {
            let mean = logits.mean_dim(2).squeeze_dim::<2>(2);
            let mean = mean.mask_fill(is_target.bool_not(), 0.0);
            losses.objective = losses.objective - mean.mul_scalar(0.1);
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

    fn flops_per_token(&self, _: usize) -> f64 {
        unreachable!("verify does not measure its speed")
    }
}

/// A [`Subject`] with a small decoder, four samples of eight tokens, and an optional fault. The number of targets
/// increases from the first to the last sample.
#[derive(Clone, Copy, Debug, Default)]
pub struct FaultySubject {
    /// The injected fault, if any.
    pub fault: Option<Fault>,
    /// The FP8 recipe of the linear layers, if any.
    pub fp8: Option<Fp8Recipe>,
    /// Whether GELU is computed in the epilogues of the adjacent matrix multiplications. Cannot be combined with FP8.
    pub epilogues: bool,
}

impl FaultySubject {
    fn fp8_config(&self) -> Fp8Config {
        Fp8Config {
            recipe: self.fp8,
            ..Fp8Config::default()
        }
    }

    /// Returns random tokens of shape `[seq]`.
    fn draws(&self, key: u64, step: usize, sample: usize) -> Vec<i32> {
        integers(&Stream::new(key, step as u64), sample * SEQ, SEQ, TOKENS)
    }
}

/// The training samples. [`Fault::SameSamples`] repeats the first `distinct` samples of each step.
struct FaultySamples {
    subject: FaultySubject,
    distinct: usize,
}

impl Samples for FaultySamples {
    fn seq(&self) -> usize {
        SEQ
    }

    fn sample(&self, number: u64) -> Result<Sample, DataError> {
        let (step, sample) = (number as usize / SAMPLES, number as usize % SAMPLES);
        let sample = sample % self.distinct;
        let draws = self.subject.draws(2, step, sample).into_iter().enumerate();
        let target = |(at, target)| {
            if at <= 2 * sample {
                target
            } else {
                IGNORE as i32
            }
        };
        Ok(Sample {
            tokens: self.subject.draws(1, step, sample),
            targets: draws.map(target).collect(),
            documents: vec![],
            padding: 0,
        })
    }
}

impl Subject for FaultySubject {
    type Model = Decoder;

    fn build(
        &self,
        groups: &ParallelContext,
        device: &Device,
    ) -> Result<ParallelModule<Decoder>, BuildError> {
        let scope =
            ModelBuilder::with(groups, device, 3, DType::F64).with_fp8(&self.fp8_config())?;
        let decoder = Decoder::new(*self, &scope)?;
        let mut model = scope.finish(decoder)?;
        let entries = model.table.entries_mut();
        match self.fault {
            Some(Fault::NormNotSummed) => {
                let norm = named(entries, "norm.weight");
                norm.sum_over = norm.sum_over.without(Axis::Tensor);
            }
            Some(Fault::CountedTwice) => {
                let (size, parts) = (HIDDEN * groups.place().size, groups.place().size);
                let sections = vec![Section { size, parts }];
                let placement = Placement::Split { dim: 0, sections };
                named(entries, "norm.weight").placements = (Axis::Tensor, placement).into();
            }
            Some(Fault::OwnWeights) if groups.data().rank() == 1 => {
                model.module = model.module.map(&mut AddDrift);
            }
            Some(Fault::OneSeed) => {
                let comm = groups.tensor().clone();
                model.module = model.module.map(&mut BroadcastFirst(comm));
            }
            _ => {}
        }
        Ok(model)
    }

    fn wrap(
        &self,
        model: ParallelModule<Decoder>,
        groups: &ParallelContext,
        config: &DataParallelConfig,
    ) -> Result<DistributedDataParallel<Decoder>, DataParallelError> {
        let groups = groups.clone();
        let tensor = |how| CorruptedComm::wrap(groups.tensor(), how);
        let data = |how| CorruptedComm::wrap(groups.data(), how);
        let groups = match self.fault {
            Some(Fault::SharedNotSummed) => groups
                .clone()
                .with_tensor(tensor(Corruption::SkipInSubgroups)),
            Some(Fault::LocalNorm) => {
                let world = CorruptedComm::wrap(groups.world(), Corruption::OwnSquares);
                groups.clone().with_world(world)
            }
            Some(Fault::NoDataSum) => groups.clone().with_data(data(Corruption::Skip)),
            Some(Fault::NotCleared) => groups.clone().with_data(data(Corruption::NotCleared)),
            Some(Fault::Drift) => groups.clone().with_data(data(Corruption::Drift)),
            _ => groups,
        };
        DistributedDataParallel::with(model, &groups, config)
    }

    fn rounding(&self, layout: &Layout) -> Option<Rounding> {
        let sizes = RoundingSizes {
            kv_groups: GROUPS,
            split_widths: vec![HIDDEN, GROUPS * HIDDEN / HEADS, WIDTH],
            ..RoundingSizes::default()
        };
        Rounding::in_8_bits(&self.fp8_config(), layout, &sizes)
    }

    fn samples(&self) -> usize {
        SAMPLES
    }

    fn data(&self, groups: &ParallelContext) -> Arc<dyn Samples> {
        let distinct = match self.fault {
            Some(Fault::SameSamples) => SAMPLES / groups.data().size(),
            _ => SAMPLES,
        };
        let subject = *self;
        Arc::new(FaultySamples { subject, distinct })
    }
}

fn named<'a>(entries: &'a mut [ParameterEntry], path: &str) -> &'a mut ParameterEntry {
    let found = entries.iter_mut().find(|entry| entry.path == path);
    found.unwrap_or_else(|| panic!("the decoder has no {path}"))
}

/// Makes every parameter slightly larger.
struct AddDrift;

impl ModuleMapper for AddDrift {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| tensor.mul_scalar(1.0 + DRIFT))
    }
}

/// Replaces every parameter with the parameter of the first rank.
struct BroadcastFirst(Comm);

impl ModuleMapper for BroadcastFirst {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| {
            let (shape, device, dtype) = (tensor.dims(), tensor.device(), tensor.dtype());
            match self.0.broadcast(to_buffer(tensor), 0) {
                Ok(first) => from_buffer(first, shape, &device, dtype),
                Err(error) => burn_megatron::comm::raise(error),
            }
        })
    }
}
