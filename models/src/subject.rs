//! A transformer as a subject of `verify`, with random tokens.

use std::sync::Arc;

use burn::tensor::{DType, Device};
use burn_megatron::choice::KernelChoices;
use burn_megatron::comm::ParallelContext;
use burn_megatron::data::{DataError, IGNORE, Sample, Samples};
use burn_megatron::kernels::philox::Stream;
use burn_megatron::nn::fp8::Fp8Config;
use burn_megatron::nn::{BuildError, ModelBuilder, ParallelModule};
use burn_megatron::pipeline::split::StageLayout;
use burn_megatron::verify::{Layout, Rounding, Subject};

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
    fn draws(&self, key: u64, step: usize, sample: usize, below: usize) -> Vec<i32> {
        let seq = self.sequence();
        let mut draws = Vec::with_capacity(seq);
        let stream = Stream::new(self.seed ^ key, step as u64);
        stream.words((sample * seq) as u64, seq, |_, word| {
            draws.push(((u64::from(word) * below as u64) >> 32) as i32);
        });
        draws
    }

    /// The starts of the documents of a sample, on average every third token.
    fn documents(&self, step: usize, sample: usize) -> Vec<usize> {
        let draws = self.draws(4, step, sample, 3).into_iter().enumerate();
        let starts = draws.filter(|(at, draw)| *at == 0 || *draw == 0);
        starts.map(|(at, _)| at).collect()
    }

    /// One target in eight is ignored.
    fn targets(&self, step: usize, sample: usize) -> Vec<i32> {
        let targets = self
            .draws(2, step, sample, self.config.vocabulary)
            .into_iter();
        let ignored = self.draws(3, step, sample, 8);
        let target = |(target, ignored)| {
            if ignored == 0 { IGNORE } else { target }
        };
        targets.zip(ignored).map(target).collect()
    }
}

/// The training samples, in order.
impl Samples for TransformerSubject {
    fn seq(&self) -> usize {
        self.sequence()
    }

    fn sample(&self, number: u64) -> Result<Sample, DataError> {
        let number = number as usize;
        let (step, sample) = (number / self.samples, number % self.samples);
        Ok(Sample {
            tokens: self.draws(1, step, sample, self.config.vocabulary),
            targets: self.targets(step, sample),
            documents: if self.packed {
                self.documents(step, sample)
            } else {
                vec![]
            },
        })
    }
}

impl Subject for TransformerSubject {
    type Model = Transformer;

    fn build(
        &self,
        groups: &ParallelContext,
        device: &Device,
    ) -> Result<ParallelModule<Transformer>, BuildError> {
        self.config.init_with(self.scope(groups, device)?)
    }

    fn samples(&self) -> usize {
        self.samples
    }

    fn data(&self, _: &ParallelContext) -> Arc<dyn Samples> {
        Arc::new(self.clone())
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn rounding(&self, layout: &Layout) -> Option<Rounding> {
        rounding::of(self, layout)
    }

    fn layers(&self) -> usize {
        self.config.layers
    }

    fn build_stages(
        &self,
        groups: &ParallelContext,
        device: &Device,
        stages: &[(usize, StageLayout)],
    ) -> Result<ParallelModule<Transformer>, BuildError> {
        let scope = self.scope(groups, device)?;
        self.config.init_stages(scope, stages)
    }
}
