//! The trainer of a rank.

use std::io;

use burn::tensor::Device;

use super::config::TrainConfig;
use super::error::TrainError;
use super::hooks::cuda_graphs::{CudaGraphStats, CudaGraphs};
use super::hooks::{HookError, Hooks, StepContext, StepHook};
use super::micro_batches::{BatchPlan, MicroBatchRunner};
use super::position::RunPosition;
use super::save::Saver;
use burn_megatron::data_parallel::DistributedDataParallel;
use burn_megatron::model::LanguageModel;
use burn_megatron::nn::moe::RouterStep;
use burn_megatron::optim::{LossScaler, ParallelOptimizer};
use burn_megatron::pipeline::engine::ActionEvent;
use burn_megatron_data::tokenizer::Tokenizer;
use burn_megatron_data::{Batch, DataError, Samples};
use burn_megatron_generate::{GenerateConfig, GenerateError, GenerationOutput, Generator};

/// The trainer of one rank, which trains the rank's part of a model. Every rank of the mesh has a trainer.
///
/// ```
/// use burn::tensor::Device;
/// use burn_megatron::prelude::*;
/// use burn_megatron_data::TextData;
/// use burn_megatron_train::{NoopObserver, TrainConfig, Trainer};
///
/// /// Trains a model with tensor parallelism over two threads, and returns the number of steps of each rank.
/// fn train<C: ModelConfig>(config: &C, text: &TextData) -> Result<Vec<usize>, AnyError> {
///     let layout = ParallelConfig::new().with_tensor(2);
///     let settings = TrainConfig { steps: 10, warmup_steps: 2, ..TrainConfig::default() };
///     let steps = World::threads(2)?.run(|rank| {
///         let groups = ParallelContext::new(&layout, &rank)?;
///         let device = Device::flex();
///         let model = config.init(&groups, &device)?;
///         let mut trainer = Trainer::new(model, &groups, &device, &settings)?;
///         Ok::<_, AnyError>(trainer.fit(text, &mut NoopObserver)?.steps)
///     })?;
///     Ok(steps)
/// }
/// ```
pub struct Trainer<M: LanguageModel> {
    pub(super) ddp: DistributedDataParallel<M>,
    pub(super) optimizer: ParallelOptimizer,
    pub(super) scaler: LossScaler,
    pub(super) position: RunPosition,
    pub(super) config: TrainConfig,
    pub(super) device: Device,
    pub(super) runner: MicroBatchRunner,
    pub(super) hooks: Hooks<M>,
    /// The bytes per token of the training data; 1 if unknown.
    pub(super) bytes_per_token: f64,
    pub(super) saver: Option<Saver>,
    /// See [`Trainer::defer_readings`].
    pub(super) defers: bool,
}

impl<M: LanguageModel> Trainer<M> {
    /// Returns the model and its parameters.
    pub fn model(&self) -> &DistributedDataParallel<M> {
        &self.ddp
    }

    /// Returns the device of this rank.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the loss scaler, which holds the loss scale of the next step.
    pub fn scaler(&self) -> &LossScaler {
        &self.scaler
    }

    /// Returns the actions of the pipeline schedule that this rank ran in the last step, in order, with their measured
    /// times.
    pub fn events(&self) -> &[ActionEvent] {
        &self.runner.events
    }

    /// Returns the reports of the routers on this rank about the last step.
    pub fn router_step(&self) -> &RouterStep {
        &self.runner.router_step
    }

    /// Returns the statistics of CUDA graphs, or `None` without [`cuda_graph`](TrainConfig::cuda_graph).
    pub fn cuda_graphs(&self) -> Option<CudaGraphStats> {
        self.hook::<CudaGraphs>().map(|graphs| graphs.stats)
    }

    /// Sets whether [`fit`](Self::fit) defers the reading of statistics. Deferred statistics are read one step later,
    /// so that the host does not wait for the step that it has just launched. Deferred readings do not change weights,
    /// metrics and checkpoints. The default is true on GPUs with a fused optimizer, unless a hook reads the statistics
    /// of each step. On the CPU, the default is false.
    ///
    /// With deferred readings, the device computes whether a step is skipped. A skipped step still gathers the
    /// parameters. Before a checkpoint, before an evaluation and at the end of the run, the host waits for the last
    /// step. [`step`](Self::step) waits for its own step.
    ///
    /// # Errors
    ///
    /// - [`TrainError::Unfused`] if `defers` is true and the optimizer is not the fused AdamW.
    /// - [`TrainError::Deferred`] if `defers` is true and spike detection or replay checks are enabled.
    /// - The error of a custom hook that reads the statistics of each step.
    pub fn defer_readings(&mut self, defers: bool) -> Result<(), TrainError> {
        if defers && !self.optimizer.is_fused() {
            return Err(TrainError::Unfused);
        }
        if let Some(error) = self.hooks.deferral_error().filter(|_| defers) {
            return Err(error);
        }
        self.defers = defers;
        Ok(())
    }

    /// Returns the number of finished steps, including the steps before the checkpoint from which the run was resumed.
    pub fn steps(&self) -> usize {
        self.position.steps()
    }

    pub(super) fn sequence_length(&self) -> usize {
        self.config
            .sequence_length
            .unwrap_or(self.ddp.module().context())
    }

    /// Returns the assignment of samples to micro-batches.
    pub(super) fn batch_plan(&self) -> BatchPlan {
        let mut plan = BatchPlan::new(&self.config, &self.ddp);
        self.hooks.batches(&mut plan);
        plan
    }

    /// Returns the micro-batches that the next call of [`step`](Self::step) with `samples` processes on this rank.
    ///
    /// # Errors
    ///
    /// [`DataError`] if samples cannot be read, or cannot be split as the layout requires.
    pub fn next_batches(&self, samples: &dyn Samples) -> Result<Vec<Batch>, DataError> {
        let next = (self.steps(), self.position.samples);
        self.batch_plan().own_batches(next, samples)
    }

    /// Generates text that continues a prompt. The result is the same on all ranks. The default seed is the seed of the
    /// run. `on_text` is called with each new part of the text, as in [`Generator::generate`]. Collective: call on all
    /// ranks of the tensor, pipeline and context axes. With full sharding or expert parallelism, call it also on all
    /// ranks of the data axis.
    ///
    /// # Errors
    ///
    /// [`TrainError`] for invalid settings, for a tokenizer whose vocabulary does not match the model, and for
    /// communication errors.
    pub fn generate(
        &self,
        config: &GenerateConfig,
        tokenizer: &Tokenizer,
        on_text: &mut dyn FnMut(&str) -> io::Result<()>,
    ) -> Result<GenerationOutput, TrainError> {
        let mut config = config.clone();
        config.seed = config.seed.or(Some(self.config.seed));
        let prompt = config.prompt_tokens(tokenizer);
        let prompt = prompt.map_err(GenerateError::from)?;
        let mut generator = Generator::new(self.ddp.module(), self.ddp.groups(), &self.device)
            .with_placement(self.runner.placement());
        let generated = generator.generate(&prompt, &config, tokenizer, on_text);
        Ok(generated?)
    }

    /// Adds a hook. All ranks must add hooks in the same order: see [`ORDER`](super::hooks::ORDER).
    ///
    /// # Errors
    ///
    /// [`HookError::Duplicate`] if the trainer already has a hook with this name, and the error of [`StepHook::check`].
    pub fn with_hook(mut self, hook: impl StepHook<M>) -> Result<Self, TrainError> {
        if self.hooks.names().any(|name| name == hook.name()) {
            return Err(HookError::Duplicate(hook.name().into()).into());
        }
        let (_, context) = self.split(self.steps());
        hook.check(&context)?;
        self.hooks.add(Some(hook));
        self.defers &= self.hooks.deferral_error().is_none();
        Ok(self)
    }

    /// Removes a hook. Call this method on every rank. The technique of the hook is then disabled, even if the settings
    /// enable it.
    ///
    /// # Errors
    ///
    /// [`HookError::Unknown`] if the trainer has no hook with this name.
    pub fn without_hook(mut self, name: &str) -> Result<Self, TrainError> {
        let mut hook = self.hooks.remove(name)?;
        let (_, mut context) = self.split(self.steps());
        hook.removed(&mut context);
        Ok(self)
    }

    /// Returns the hook of type `H`, or `None` if the trainer does not have such a hook.
    pub fn hook<H: StepHook<M>>(&self) -> Option<&H> {
        self.hooks.get()
    }

    /// Returns the names of the trainer's hooks, in the order in which they are called.
    pub fn hook_names(&self) -> Vec<&str> {
        self.hooks.names().collect()
    }

    /// Splits the trainer into its hooks and a context for them, in a step or before the next step.
    pub(super) fn split(&mut self, step: usize) -> (&mut Hooks<M>, StepContext<'_, M>) {
        let plan = self.batch_plan();
        let context = StepContext {
            step,
            ddp: &mut self.ddp,
            optimizer: &mut self.optimizer,
            runner: &mut self.runner,
            position: &self.position,
            scaler: &self.scaler,
            config: &self.config,
            device: &self.device,
            plan,
            defers: self.defers,
        };
        (&mut self.hooks, context)
    }
}
