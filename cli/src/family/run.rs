//! Training and generation with a model of any family.

use std::io;
use std::sync::Arc;

use burn::tensor::Device;
use burn_megatron::checkpoint::{Checkpoint, LoadTolerance, TensorSource, load_weights};
use burn_megatron::comm::ParallelContext;
use burn_megatron::data_parallel::{
    DataParallelConfig, DistributedDataParallel, MemoryPlan, Precision, ZeroStage,
};
use burn_megatron::kernel_selection::KernelSelection;
use burn_megatron::kernels::device_memory::{DriverMemory, driver_memory};
use burn_megatron::model::{LanguageModel, ModelConfig};
use burn_megatron::nn::fp8::Fp8;
use burn_megatron::nn::{ActivationUsage, ModelBuilder};
use burn_megatron::pipeline::engine::ActionEvent;
use burn_megatron_comm_testing::fault_injection::FaultPlan;
use burn_megatron_data::Dataset;
use burn_megatron_data::tokenizer::Tokenizer;
use burn_megatron_generate::{GenerateConfig, GenerationOutput, Generator, Written};
use burn_megatron_train::{Observer, Saver, TrainOutcome, Trainer};

use crate::error::Error;
use crate::final_sample::OnText;

/// Trainer of a model of any family; see [`Trainer`].
pub trait AnyTrainer {
    fn steps(&self) -> usize;
    fn load(&mut self, checkpoint: &Checkpoint, leniency: LoadTolerance) -> Result<(), Error>;
    fn load_weights(
        &mut self,
        weights: &dyn TensorSource,
        leniency: LoadTolerance,
    ) -> Result<(), Error>;
    fn save_with(&mut self, saver: Saver);
    fn inject(&mut self, faults: Arc<FaultPlan>);
    fn fit(
        &mut self,
        data: &dyn Dataset,
        observer: &mut dyn Observer,
    ) -> Result<TrainOutcome, Error>;
    fn generate(
        &self,
        config: &GenerateConfig,
        tokenizer: &Tokenizer,
        on_text: OnText<'_>,
    ) -> Result<GenerationOutput, Error>;
    fn events(&self) -> &[ActionEvent];
    fn fp8(&self) -> &Fp8;
    fn kernels(&self) -> &KernelSelection;
    fn loss_scale(&self) -> f64;
    fn memory(&self) -> Result<RankMemory, Error>;
}

/// Memory of a rank's training state.
pub struct RankMemory {
    pub planned: MemoryPlan,
    /// The peak memory of each kind.
    pub peak: MemoryPlan,
    /// The maximum number of blocks that were gathered at once, with ZeRO-3.
    pub peak_unsharded_units: Option<u64>,
    /// The bytes of the inputs of recomputed blocks, on the device and on the host.
    pub inputs: ActivationUsage,
    /// The device memory as counted by its driver, if the driver reports it.
    pub driver: Option<DriverMemory>,
}

impl<M: LanguageModel> AnyTrainer for Trainer<M> {
    fn steps(&self) -> usize {
        self.steps()
    }

    fn load(&mut self, checkpoint: &Checkpoint, leniency: LoadTolerance) -> Result<(), Error> {
        Ok(self.load(checkpoint, leniency)?)
    }

    fn load_weights(
        &mut self,
        weights: &dyn TensorSource,
        leniency: LoadTolerance,
    ) -> Result<(), Error> {
        Ok(self.load_weights(weights, leniency)?)
    }

    fn save_with(&mut self, saver: Saver) {
        self.save_with(saver);
    }

    fn inject(&mut self, faults: Arc<FaultPlan>) {
        self.inject(faults);
    }

    fn fit(
        &mut self,
        data: &dyn Dataset,
        observer: &mut dyn Observer,
    ) -> Result<TrainOutcome, Error> {
        Ok(self.fit(data, observer)?)
    }

    fn generate(
        &self,
        config: &GenerateConfig,
        tokenizer: &Tokenizer,
        on_text: OnText<'_>,
    ) -> Result<GenerationOutput, Error> {
        Ok(self.generate(config, tokenizer, on_text)?)
    }

    fn events(&self) -> &[ActionEvent] {
        self.events()
    }

    fn fp8(&self) -> &Fp8 {
        self.model().fp8()
    }

    fn kernels(&self) -> &KernelSelection {
        self.model().kernels()
    }

    fn loss_scale(&self) -> f64 {
        self.scaler().scale()
    }

    fn memory(&self) -> Result<RankMemory, Error> {
        let ddp = self.model();
        let usage = ddp.usage();
        let full = ddp.config().zero_stage == ZeroStage::Parameters;
        Ok(RankMemory {
            planned: ddp.memory_plan()?,
            peak: usage.peak(),
            inputs: ddp.recompute().offloaded(),
            peak_unsharded_units: full.then(|| usage.peak_unsharded_units()),
            driver: driver_memory(self.device()),
        })
    }
}

/// Rank's part of a model of any family, for generation.
pub trait AnyGenerator {
    /// Generates texts; see [`Generator::generate_batch`]. Also returns the number of bytes of this rank's KV cache.
    fn generate(
        &self,
        prompts: &[Vec<u32>],
        batch_size: usize,
        config: &GenerateConfig,
        tokenizer: &Tokenizer,
        use_cache: bool,
        on_text: &mut dyn FnMut(usize, Written<'_>) -> io::Result<()>,
    ) -> Result<(Vec<GenerationOutput>, usize), Error>;
}

/// Model with its weights.
pub struct LoadedModel<M: LanguageModel> {
    ddp: DistributedDataParallel<M>,
    groups: ParallelContext,
    device: Device,
}

impl<M: LanguageModel> LoadedModel<M> {
    /// Builds a rank's part of the model, and loads its weights.
    pub fn new<C: ModelConfig<Model = M>>(
        config: &C,
        builder: ModelBuilder,
        precision: Precision,
        weights: &dyn TensorSource,
    ) -> Result<Self, Error> {
        let (groups, device) = (builder.groups().clone(), builder.device().clone());
        let data_parallel = DataParallelConfig {
            precision,
            ..DataParallelConfig::default()
        };
        let model = config.init_with(builder)?;
        let mut ddp = DistributedDataParallel::with(model, &groups, &data_parallel)?;
        load_weights(&mut ddp, weights, LoadTolerance::default())?;
        Ok(Self {
            ddp,
            groups,
            device,
        })
    }
}

impl<M: LanguageModel> AnyGenerator for LoadedModel<M> {
    fn generate(
        &self,
        prompts: &[Vec<u32>],
        batch_size: usize,
        config: &GenerateConfig,
        tokenizer: &Tokenizer,
        use_cache: bool,
        on_text: &mut dyn FnMut(usize, Written<'_>) -> io::Result<()>,
    ) -> Result<(Vec<GenerationOutput>, usize), Error> {
        let mut generator = Generator::new(self.ddp.module(), &self.groups, &self.device);
        if !use_cache {
            generator = generator.without_cache();
        }
        let outputs = generator.generate_batch(prompts, batch_size, config, tokenizer, on_text)?;
        Ok((outputs, generator.cache_bytes()))
    }
}
