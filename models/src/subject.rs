//! A transformer as a subject of `verify`, with random tokens.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_megatron::choice::KernelChoices;
use burn_megatron::comm::ParallelContext;
use burn_megatron::kernels::philox::Stream;
use burn_megatron::nn::fp8::Fp8Config;
use burn_megatron::nn::{BuildError, ModelBuilder, ParallelModule};
use burn_megatron::pipeline::engine::StageOutput;
use burn_megatron::pipeline::split::{LayerSplit, StageLayout};
use burn_megatron::train::{LanguageModel, Tokens};
use burn_megatron::verify::{Layout, Rounding, StageCall, Subject};

use crate::{Transformer, TransformerConfig, rounding};

/// A small transformer on random tokens, some of whose targets are ignored, so that the ranks of
/// the data axis have different numbers of tokens.
#[derive(Clone, Debug)]
pub struct TransformerSubject {
    /// The model.
    pub config: TransformerConfig,
    /// The seed of its weights, its dropout and its tokens.
    pub seed: u64,
    /// Samples per step.
    pub samples: usize,
    /// The kernel selection.
    pub kernels: KernelChoices,
    /// Whether samples consist of several documents.
    pub packed: bool,
    /// The FP8 configuration.
    pub fp8: Fp8Config,
    /// Tokens per sample; by default the model's context.
    pub sequence_length: Option<usize>,
    /// How layers are split over pipeline stages.
    pub split: LayerSplit,
    /// The compute type; parameters are f64 for f64, and f32 for others.
    pub dtype: DType,
}

impl TransformerSubject {
    fn scope(&self, groups: &ParallelContext, device: &Device) -> Result<ModelBuilder, BuildError> {
        let parameters = match self.dtype {
            DType::F64 => DType::F64,
            _ => DType::F32,
        };
        let scope = ModelBuilder::with(groups, device, self.seed, parameters)
            .with_compute_dtype(self.dtype);
        scope.with_kernels(&self.kernels)?.with_fp8(&self.fp8)
    }

    pub(crate) fn sequence(&self) -> usize {
        self.sequence_length.unwrap_or(self.config.context)
    }

    /// `[seq]` random integers below `below`.
    fn draws(&self, key: u64, step: usize, sample: usize, below: usize) -> Vec<i64> {
        let seq = self.sequence();
        let mut draws = Vec::with_capacity(seq);
        let stream = Stream::new(self.seed ^ key, step as u64);
        stream.words((sample * seq) as u64, seq, |_, word| {
            draws.push(((u64::from(word) * below as u64) >> 32) as i64);
        });
        draws
    }

    /// The starts of the documents of some samples, on average every third token, and the end of the last one.
    fn documents(&self, step: usize, samples: Range<usize>) -> Arc<[i32]> {
        let (seq, first) = (self.sequence(), samples.start);
        let begins = samples
            .clone()
            .flat_map(|sample| {
                let draws = self.draws(4, step, sample, 3).into_iter().enumerate();
                let begins: Vec<_> = draws
                    .filter(|(at, draw)| *at == 0 || *draw == 0)
                    .map(|(at, _)| (sample - first) * seq + at)
                    .collect();
                begins
            })
            .chain([samples.len() * seq]);
        begins.map(|at| at as i32).collect()
    }

    /// Tokens and targets `[samples, seq]`, on the device of `verify`.
    fn batch(&self, step: usize, samples: Range<usize>) -> (Tokens, Tensor<2, Int>) {
        let shape = [samples.len(), self.sequence()];
        let device = Device::flex().autodiff();
        let rows = |row: &dyn Fn(usize) -> Vec<i64>| {
            let data = TensorData::new(samples.clone().flat_map(row).collect(), shape);
            Tensor::<2, Int>::from_data(data, &device)
        };
        let tokens = Tokens {
            ids: rows(&|sample| self.tokens(step, sample)),
            documents: self.packed.then(|| self.documents(step, samples.clone())),
        };
        (tokens, rows(&|sample| self.targets(step, sample)))
    }

    fn tokens(&self, step: usize, sample: usize) -> Vec<i64> {
        self.draws(1, step, sample, self.config.vocabulary)
    }

    /// One target in eight is ignored.
    fn targets(&self, step: usize, sample: usize) -> Vec<i64> {
        let targets = self
            .draws(2, step, sample, self.config.vocabulary)
            .into_iter();
        let ignored = self.draws(3, step, sample, 8);
        let target = |(target, ignored)| {
            if ignored == 0 {
                Transformer::IGNORE
            } else {
                target
            }
        };
        targets.zip(ignored).map(target).collect()
    }
}

impl Subject for TransformerSubject {
    type Model = Transformer;

    fn build(
        &self,
        groups: &ParallelContext,
        device: &Device,
        sequence_parallel: bool,
    ) -> Result<ParallelModule<Transformer>, BuildError> {
        self.config
            .init(self.scope(groups, device)?, sequence_parallel)
    }

    fn samples(&self) -> usize {
        self.samples
    }

    fn input_shape(&self) -> [usize; 2] {
        [self.sequence(), self.config.hidden]
    }

    fn tokens(&self, step: usize, samples: Range<usize>) -> u64 {
        let counted = |sample| {
            self.targets(step, sample)
                .into_iter()
                .filter(|t| *t >= 0)
                .count()
        };
        samples.map(|sample| counted(sample) as u64).sum()
    }

    fn loss(
        &self,
        model: &Transformer,
        step: usize,
        samples: Range<usize>,
        offset: Tensor<3>,
    ) -> Tensor<1> {
        let (tokens, targets) = self.batch(step, samples);
        model.losses(tokens, targets, Some(offset)).sum()
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn rounding(&self, layout: &Layout) -> Option<Rounding> {
        rounding::of(self, layout)
    }

    fn output_weight<'a>(&self, model: &'a Transformer) -> Option<&'a str> {
        Some(LanguageModel::output_weight(model))
    }

    fn layers(&self) -> usize {
        self.config.layers
    }

    fn split(&self) -> LayerSplit {
        self.split.clone()
    }

    fn build_stages(
        &self,
        groups: &ParallelContext,
        device: &Device,
        sequence_parallel: bool,
        stages: &[(usize, StageLayout)],
    ) -> Result<ParallelModule<Transformer>, BuildError> {
        let scope = self.scope(groups, device)?;
        self.config.init_stages(scope, sequence_parallel, stages)
    }

    fn stage(&self, model: &Transformer, call: StageCall) -> StageOutput {
        let (tokens, targets) = self.batch(call.step, call.samples);
        let hidden = model.hidden(call.stage, call.input, tokens, call.offset);
        if call.last {
            StageOutput::Loss(model.losses_of(hidden, targets).objective.sum())
        } else {
            StageOutput::Activation(hidden)
        }
    }
}
