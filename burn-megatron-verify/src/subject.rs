//! A [`Subject`] that trains a small model on random tokens.

use std::sync::Arc;

use burn::tensor::{DType, Device};
use burn_megatron_kernels::philox::Stream;

use super::{Layout, Rounding, Subject};
use burn_megatron::comm::ParallelContext;
use burn_megatron::kernel_selection::KernelChoices;
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::model::{ModelConfig, RoundingSizes};
use burn_megatron::nn::fp8::Fp8Config;
use burn_megatron::nn::lora::LoraConfig;
use burn_megatron::nn::{BuildError, ModelBuilder, ParallelModule};
use burn_megatron_data::{DataError, IGNORE, Sample, Samples};

/// A [`Subject`] that trains a model on random tokens. Some targets are ignored, so that the data-parallel ranks have
/// different numbers of tokens in the loss.
///
/// ```
/// use burn_megatron::model::ModelConfig;
/// use burn_megatron_verify::{Layout, ModelSubject, VerifyError, VerifyOptions, verify};
///
/// /// Prints whether a model computes the same in all standard layouts.
/// fn check<C: ModelConfig>(config: C) -> Result<bool, VerifyError> {
///     let subject = ModelSubject::new(config);
///     let report = verify(&subject, &Layout::standard(), &VerifyOptions::default())?;
///     println!("{report}");
///     Ok(report.passes())
/// }
/// ```
#[derive(Clone, Debug)]
pub struct ModelSubject<C> {
    /// The configuration of the model.
    pub config: C,
    /// The seed for the initial weights, dropout and the random tokens.
    pub seed: u64,
    /// The number of samples per step.
    pub samples: usize,
    /// The operations that use fused kernels.
    pub kernels: KernelChoices,
    /// Whether each sample consists of several packed documents.
    pub packed: bool,
    /// The FP8 configuration.
    pub fp8: Fp8Config,
    /// The settings of LoRA adapters. If it is `None`, all parameters are trained.
    pub lora: Option<LoraConfig>,
    /// The number of tokens per sample. `None` means the context length of the model.
    pub sequence_length: Option<usize>,
    /// The compute dtype. Parameters are f64 if the compute dtype is f64, and f32 otherwise.
    pub dtype: DType,
}

/// Returns `count` random integers from 0 to `below - 1`, starting at index `start` of a random stream.
pub(crate) fn integers(stream: &Stream, start: usize, count: usize, below: usize) -> Vec<i32> {
    let mut integers = Vec::with_capacity(count);
    stream.words(start as u64, count, |_, word| {
        integers.push(((u64::from(word) * below as u64) >> 32) as i32);
    });
    integers
}

impl<C> ModelSubject<C> {
    /// Returns a subject with the same settings and another model configuration.
    pub fn with_config<D>(self, config: D) -> ModelSubject<D> {
        let Self {
            config: _,
            seed,
            samples,
            kernels,
            packed,
            fp8,
            lora,
            sequence_length,
            dtype,
        } = self;
        ModelSubject {
            config,
            seed,
            samples,
            kernels,
            packed,
            fp8,
            lora,
            sequence_length,
            dtype,
        }
    }
}

impl<C: ModelConfig> ModelSubject<C> {
    /// Creates a subject that computes in f64 with seed 0 and the default kernels. A step has eight samples, as
    /// [`Layout::pipelines`] and [`Layout::sharded`] require. Each sample is one document with the context length of
    /// the model.
    pub fn new(config: C) -> Self {
        Self {
            config,
            seed: 0,
            samples: 8,
            kernels: KernelChoices::default(),
            packed: false,
            fp8: Fp8Config::default(),
            lora: None,
            sequence_length: None,
            dtype: DType::F64,
        }
    }

    fn scope(&self, groups: &ParallelContext, device: &Device) -> Result<ModelBuilder, BuildError> {
        let parameters = match self.dtype {
            DType::F64 => DType::F64,
            _ => DType::F32,
        };
        let scope = ModelBuilder::with(groups, device, self.seed, parameters)
            .with_compute_dtype(self.dtype)
            .with_composed_epilogues();
        let scope = scope.with_kernels(&self.kernels)?.with_fp8(&self.fp8)?;
        scope.with_lora(self.lora.as_ref())
    }

    fn sequence(&self) -> usize {
        self.sequence_length.unwrap_or(self.config.context())
    }

    /// Returns the bound on differences for a dtype that is narrower than f64.
    fn rounding_of_type(&self, sizes: &RoundingSizes) -> Option<Rounding> {
        let values = sizes.values_per_layer * self.config.layers();
        let narrow = |bits: i32, name: &str| {
            let what = format!("each value between operations rounded to {name}");
            Some(Rounding::new(&[(values, 2f64.powi(-bits))], &what))
        };
        match self.dtype {
            DType::F64 => None,
            DType::BF16 => narrow(8, "bf16"),
            DType::F16 => narrow(11, "f16"),
            _ => {
                // The longest sums are over features, over classes, or over the tokens of a step.
                let longest = sizes.longest_sum.max(self.samples * self.sequence());
                let what = format!("sums of up to {longest} in another order in f32");
                Some(Rounding::new(&[(values * longest, 2f64.powi(-24))], &what))
            }
        }
    }

    /// Returns random integers from 0 to `below - 1`, of shape `[seq]`.
    fn draws(&self, key: u64, step: usize, sample: usize, below: usize) -> Vec<i32> {
        let seq = self.sequence();
        let stream = Stream::new(self.seed ^ key, step as u64);
        integers(&stream, sample * seq, seq, below)
    }

    /// Returns the indices at which the documents of a sample start. On average, every third token starts a document.
    fn documents(&self, step: usize, sample: usize) -> Vec<usize> {
        let draws = self.draws(4, step, sample, 3).into_iter().enumerate();
        let starts = draws.filter(|(at, draw)| *at == 0 || *draw == 0);
        starts.map(|(at, _)| at).collect()
    }

    /// Returns the number of padding tokens of a packed sample. In every second sample, the last document is padding,
    /// unless it is the only document.
    fn padding(&self, sample: usize, documents: &[usize]) -> usize {
        match documents {
            [_, .., last] if sample % 2 == 1 => self.sequence() - last,
            _ => 0,
        }
    }

    /// Returns the targets. On average, one target in eight is ignored.
    fn targets(&self, step: usize, sample: usize) -> Vec<i32> {
        let targets = self
            .draws(2, step, sample, self.config.vocabulary())
            .into_iter();
        let ignored = self.draws(3, step, sample, 8);
        let target = |(target, ignored)| {
            if ignored == 0 { IGNORE } else { target }
        };
        targets.zip(ignored).map(target).collect()
    }
}

/// The training samples, in order.
impl<C: ModelConfig> Samples for ModelSubject<C> {
    fn seq(&self) -> usize {
        self.sequence()
    }

    fn sample(&self, number: u64) -> Result<Sample, DataError> {
        let number = number as usize;
        let (step, sample) = (number / self.samples, number % self.samples);
        let mut targets = self.targets(step, sample);
        let (mut documents, mut padding) = (vec![], 0);
        if self.packed {
            documents = self.documents(step, sample);
            padding = self.padding(sample, &documents);
            targets[self.sequence() - padding..].fill(IGNORE);
        }
        Ok(Sample {
            tokens: self.draws(1, step, sample, self.config.vocabulary()),
            targets,
            documents,
            padding,
        })
    }
}

impl<C: ModelConfig> Subject for ModelSubject<C> {
    type Model = C::Model;

    fn build(
        &self,
        groups: &ParallelContext,
        device: &Device,
    ) -> Result<ParallelModule<C::Model>, BuildError> {
        self.config.init_with(self.scope(groups, device)?)
    }

    fn check_layout(&self, layout: &ParallelConfig) -> Result<(), BuildError> {
        self.config.check_layout(layout)
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
        let (sizes, fp8) = (self.config.rounding_sizes(), &self.fp8);
        let in_8_bits = match self.dtype {
            DType::F64 => Rounding::in_8_bits(fp8, layout, &sizes),
            _ => Rounding::at_ties(fp8),
        };
        in_8_bits
            .into_iter()
            .chain(Rounding::of_transfers(layout))
            .chain(self.rounding_of_type(&sizes))
            .reduce(Rounding::or)
    }

    fn depends_on_micro_batches(&self) -> bool {
        self.config.depends_on_micro_batches()
    }

    fn layers(&self) -> usize {
        self.config.layers()
    }
}
