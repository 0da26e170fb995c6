//! The training strategy and its settings.

use std::path::PathBuf;
use std::sync::Arc;

use burn::optim::Optimizer;
use burn::tensor::Device;
use burn::train::{LearnerModel, TrainStep, TrainingStrategy};
use burn_megatron::comm::{Launch, World, WorldError};
use burn_megatron::data_parallel::{
    DataParallelConfig, DistributedDataParallel, Precision, ZeroStage,
};
use burn_megatron::optim::{
    ElementWise, LossScale, OptimizerConfig, OptimizerError, ParallelOptimizer, ParameterGroup,
};

use crate::checkpoints::CheckpointSettings;
use crate::optimizer::{BuildOptimizer, ShardedOptimizer};

/// A function that returns the weight of a batch.
pub(crate) type WeightFn<M> = dyn Fn(&<M as TrainStep>::Input) -> u64 + Send + Sync;

/// A training strategy for Burn's `Learner`: data parallelism with optional sharding.
///
/// Rank `r` of `R` ranks reads the items `[N r / R, N (r + 1) / R)` of the `N` training items. Each rank uses the batch
/// size of the data loader, so each micro-batch of a step consists of `R` batches. The gradient is the weighted mean of
/// the gradients of the ranks. The weight of a rank is the number of items in its batch, or the result of
/// [`weight`](Self::weight). If the loss is a mean over the batch, the weighted mean is the gradient of the mean loss
/// over all batches. The gradients of accumulated micro-batches (`grads_accumulation`) are added, as in Burn.
///
/// Rank 0 runs the validation and writes Burn's output: metrics, the summary and checkpoints. If ranks are processes,
/// the training metrics cover only the batches of rank 0. If ranks are threads, they cover the batches of all ranks.
///
/// ```
/// use burn::train::{LearnerModel, TrainingStrategy};
/// use burn_megatron::comm::WorldError;
/// use burn_megatron::data_parallel::ZeroStage;
/// use burn_megatron::optim::AdamWConfig;
/// use burn_megatron_learner::MegatronStrategy;
///
/// /// Four ranks with sharded gradients and a sharded optimizer.
/// fn strategy<M: LearnerModel + 'static>() -> Result<TrainingStrategy<M>, WorldError> {
///     let strategy = MegatronStrategy::threads(4)?
///         .zero_stage(ZeroStage::Gradients)
///         .optimizer(AdamWConfig::default())
///         .clip(1.0);
///     Ok(strategy.into())
/// }
/// ```
pub struct MegatronStrategy<M: LearnerModel> {
    pub(crate) world: World,
    /// The rank of this process, or `None` if the ranks are threads.
    pub(crate) process: Option<usize>,
    pub(crate) config: DataParallelConfig,
    pub(crate) devices: Vec<Device>,
    pub(crate) weight: Option<Box<WeightFn<M>>>,
    pub(crate) clip: f64,
    pub(crate) loss_scale: LossScale,
    /// The sharded optimizer, or `None` to use the optimizer of the `Learner`.
    pub(crate) optimizer: Option<Box<BuildOptimizer<M>>>,
    pub(crate) checkpoints: Option<CheckpointSettings>,
}

impl<M: LearnerModel> From<MegatronStrategy<M>> for TrainingStrategy<M> {
    fn from(strategy: MegatronStrategy<M>) -> Self {
        Self::Custom(Arc::new(strategy))
    }
}

impl<M: LearnerModel> MegatronStrategy<M> {
    /// Creates a strategy whose ranks are threads of this process.
    ///
    /// # Errors
    ///
    /// [`WorldError`] if `ranks` is 0 or too large.
    pub fn threads(ranks: usize) -> Result<Self, WorldError> {
        Ok(Self::of(World::threads(ranks)?))
    }

    /// Creates a strategy whose ranks are processes, started by `torchrun`, `mpirun`, `srun` or `burn-megatron launch`.
    ///
    /// If standard output is a terminal, ranks other than 0 redirect it to the null device, because Burn's terminal
    /// interface on these ranks would overwrite the interface of rank 0. Standard error is not affected. Under mpirun,
    /// the interface of rank 0 receives no key presses, because the ranks run in the background.
    ///
    /// # Errors
    ///
    /// [`WorldError`] if no launcher has started this process, or if the launcher's environment variables contradict
    /// each other.
    pub fn from_env() -> Result<Self, WorldError> {
        let launch = Launch::from_env()?.ok_or(WorldError::NotLaunched)?;
        Ok(Self::processes(launch))
    }

    /// Creates a strategy like [`from_env`](Self::from_env) if a launcher has started this process. Otherwise creates a
    /// strategy with `ranks` threads, like [`threads`](Self::threads).
    ///
    /// # Errors
    ///
    /// See [`from_env`](Self::from_env) and [`threads`](Self::threads).
    pub fn from_env_or_threads(ranks: usize) -> Result<Self, WorldError> {
        match Launch::from_env()? {
            Some(launch) => Ok(Self::processes(launch)),
            None => Self::threads(ranks),
        }
    }

    /// Creates a strategy like [`from_env`](Self::from_env), but takes the rank of this process from `launch` instead
    /// of environment variables.
    pub fn processes(launch: Launch) -> Self {
        let rank = launch.rank;
        if rank == 0 {
            use_terminal_from_background();
        } else {
            leave_terminal();
        }
        Self {
            process: Some(rank),
            ..Self::of(World::processes(launch))
        }
    }

    fn of(world: World) -> Self {
        Self {
            world,
            process: None,
            config: DataParallelConfig::default(),
            devices: vec![],
            weight: None,
            clip: f64::INFINITY,
            loss_scale: LossScale::None,
            optimizer: None,
            checkpoints: None,
        }
    }

    /// Changes the settings of the [`World`], such as the engine, the timeouts or the number of compute threads.
    pub fn world(mut self, change: impl FnOnce(World) -> World) -> Self {
        self.world = change(self.world);
        self
    }

    /// Sets the devices of the ranks. If there are more ranks than devices, the devices are assigned round-robin. By
    /// default, all ranks use the device of the model.
    pub fn devices(mut self, devices: Vec<Device>) -> Self {
        self.devices = devices;
        self
    }

    /// Sets the function that returns the weight of a batch in the mean gradient over ranks. The weight must be the
    /// number of elements over which the loss of the batch is averaged, for example the number of tokens without
    /// padding. The default weight is the number of items.
    pub fn weight(
        mut self,
        of: impl Fn(&<M as TrainStep>::Input) -> u64 + Send + Sync + 'static,
    ) -> Self {
        self.weight = Some(Box::new(of));
        self
    }

    /// Clips the gradients of all parameters together, so that their global 2-norm is at most `norm`. Burn's gradient
    /// clipping, which is a setting of the optimizer, clips each parameter separately.
    pub fn clip(mut self, norm: f64) -> Self {
        self.clip = norm;
        self
    }

    /// Sets the data type in which the model computes. Master weights and accumulated gradients are always f32. With
    /// f16, dynamic loss scaling is enabled, and the model must apply the loss scale with
    /// [`scale_loss`](crate::scale_loss).
    pub fn precision(mut self, precision: Precision) -> Self {
        self.config.precision = precision;
        if precision == Precision::F16 && self.loss_scale == LossScale::None {
            self.loss_scale = LossScale::Dynamic(Default::default());
        }
        self
    }

    /// Sets the loss scale, which the model must apply with [`scale_loss`](crate::scale_loss). Call this method after
    /// [`precision`](Self::precision).
    pub fn loss_scale(mut self, loss_scale: LossScale) -> Self {
        self.loss_scale = loss_scale;
        self
    }

    /// Sets the ZeRO stage. Stage 1 shards the optimizer state, stage 2 also shards the gradients, and stage 3 also
    /// shards the parameters. Requires an optimizer that is set with [`optimizer`](Self::optimizer),
    /// [`element_wise`](Self::element_wise) or [`optimizer_with`](Self::optimizer_with).
    pub fn zero_stage(mut self, stage: ZeroStage) -> Self {
        self.config.zero_stage = stage;
        self
    }

    /// Sets all settings of the data-parallel wrapper, such as bucket sizes, overlap and hybrid sharding. Overrides
    /// earlier calls of [`precision`](Self::precision) and [`zero_stage`](Self::zero_stage).
    pub fn data_parallel(mut self, config: DataParallelConfig) -> Self {
        self.config = config;
        self
    }

    /// Updates the weights with an optimizer of this library, which can be sharded. `config` is an `AdamWConfig` or
    /// another [`OptimizerConfig`]. The optimizer of the `Learner` is then not used. The learning rate comes from the
    /// scheduler of the `Learner`.
    pub fn optimizer(self, config: impl Into<OptimizerConfig>) -> Self {
        let config = config.into();
        self.optimizer_with(move |ddp| ParallelOptimizer::new(&config, ddp))
    }

    /// Updates the weights with an element-wise optimizer that implements Burn's `Optimizer` trait and can be sharded.
    /// Otherwise, this method is the same as [`optimizer`](Self::optimizer). See
    /// [`ElementWise::new`](burn_megatron::optim::ElementWise::new). Checkpoints do not contain the state of this
    /// optimizer.
    pub fn element_wise<O: Optimizer + 'static>(
        self,
        build: impl Fn(f64) -> O + Send + Sync + 'static,
        groups: Vec<ParameterGroup>,
    ) -> Self {
        self.optimizer_with(move |ddp| ElementWise::new(&build, &groups, ddp))
    }

    /// Updates the weights with a custom optimizer, which `build` creates on each rank. Otherwise, this method is the
    /// same as [`optimizer`](Self::optimizer).
    pub fn optimizer_with<O: ShardedOptimizer<M> + 'static>(
        mut self,
        build: impl Fn(&DistributedDataParallel<M>) -> Result<O, OptimizerError> + Send + Sync + 'static,
    ) -> Self {
        self.optimizer = Some(Box::new(move |ddp| Ok(Box::new(build(ddp)?))));
        self
    }

    /// Saves the weights and the state of the [`optimizer`](Self::optimizer) in a sharded checkpoint after each epoch.
    /// Each rank saves its shards. Only the last `keep` checkpoints are kept. `SupervisedTraining::checkpoint(epoch)`
    /// then resumes from a sharded checkpoint, with any number of ranks.
    pub fn checkpoints(mut self, folder: impl Into<PathBuf>, keep: usize) -> Self {
        let folder = folder.into();
        self.checkpoints = Some(CheckpointSettings { folder, keep });
        self
    }

    /// Returns whether this process is rank 0, which should save the model and print results after the training.
    pub fn is_main(&self) -> bool {
        self.process.is_none_or(|rank| rank == 0)
    }
}

/// Redirects standard output to the null device if it is a terminal.
#[cfg(unix)]
fn leave_terminal() {
    use std::fs::OpenOptions;
    use std::io::{IsTerminal, stdout};
    use std::os::fd::AsRawFd;

    if !stdout().is_terminal() {
        return;
    }
    if let Ok(null) = OpenOptions::new().write(true).open("/dev/null") {
        // SAFETY: both are open descriptors of this process, and the second stays open.
        unsafe { libc::dup2(null.as_raw_fd(), libc::STDOUT_FILENO) };
    }
}

/// Allows this process to set the mode of its terminal while it runs in the background, as under mpirun. Without this
/// call, the operating system would stop the process. A process in the background receives no key presses.
#[cfg(unix)]
fn use_terminal_from_background() {
    use std::io::{IsTerminal, stdout};

    // SAFETY: no pointers.
    let is_background = || unsafe { libc::tcgetpgrp(libc::STDOUT_FILENO) != libc::getpgrp() };
    if stdout().is_terminal() && is_background() {
        for signal in [libc::SIGTTOU, libc::SIGTTIN] {
            // SAFETY: it installs no handler.
            unsafe { libc::signal(signal, libc::SIG_IGN) };
        }
    }
}

#[cfg(not(unix))]
fn leave_terminal() {}

#[cfg(not(unix))]
fn use_terminal_from_background() {}
