//! The context of a hook: the parts of a trainer that the hook can use.

use burn::tensor::Device;

use crate::TrainConfig;
use crate::micro_batches::{BatchPlan, MicroBatchRunner};
use crate::position::RunPosition;
use burn_megatron::comm::ParallelContext;
use burn_megatron::data_parallel::DistributedDataParallel;
use burn_megatron::model::LanguageModel;
use burn_megatron::optim::{LossScaler, ParallelOptimizer};

/// The context that is passed to a hook: the trainer of this rank without its hooks, and the current step.
pub struct StepContext<'a, M> {
    /// The index of the step, from 0.
    pub(crate) step: usize,
    pub(crate) ddp: &'a mut DistributedDataParallel<M>,
    pub(crate) optimizer: &'a mut ParallelOptimizer,
    pub(crate) runner: &'a mut MicroBatchRunner,
    pub(crate) position: &'a RunPosition,
    pub(crate) scaler: &'a LossScaler,
    pub(crate) config: &'a TrainConfig,
    pub(crate) device: &'a Device,
    pub(crate) plan: BatchPlan,
    pub(crate) defers: bool,
}

impl<M: LanguageModel> StepContext<'_, M> {
    /// Returns the number of the current step, counted from 1. Outside of a step, it returns the number of the next
    /// step.
    pub fn step(&self) -> usize {
        self.step + 1
    }

    /// Returns the model and its parameters.
    pub fn model(&self) -> &DistributedDataParallel<M> {
        self.ddp
    }

    /// Returns a mutable reference to the model and its parameters. All ranks must make the same changes.
    pub fn model_mut(&mut self) -> &mut DistributedDataParallel<M> {
        self.ddp
    }

    /// Returns the process groups of this rank.
    pub fn groups(&self) -> &ParallelContext {
        self.ddp.groups()
    }

    /// Returns the settings of the run.
    pub fn config(&self) -> &TrainConfig {
        self.config
    }

    /// Returns the device of this rank.
    pub fn device(&self) -> &Device {
        self.device
    }

    /// Returns the learning rate of the next step. It depends on the steps whose statistics have been read so far:
    /// after a skipped step, the learning rate stays the same.
    pub fn learning_rate(&self) -> f64 {
        self.position.learning_rate(0)
    }

    /// Returns whether the statistics of a step are read one step later: see
    /// [`defer_readings`](crate::Trainer::defer_readings).
    pub fn defers_readings(&self) -> bool {
        self.defers
    }
}
