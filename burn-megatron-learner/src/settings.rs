//! The strategy and its settings.

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

/// The weight of a batch.
pub(crate) type WeightFn<M> = dyn Fn(&<M as TrainStep>::Input) -> u64 + Send + Sync;

/// Data parallelism with optional sharding, as a training strategy of Burn's `Learner`.
///
/// Rank `r` of `R` reads the items `[N r / R, N (r + 1) / R)` of the `N` training items, in batches of the loader's
/// batch size. So a step has `R` batches. The gradient is the mean over the ranks, weighted by the number of items or
/// by [`weight`](Self::weight). If the loss is a mean over the batch, this is the gradient of the mean loss over all
/// batches of the step. Accumulated micro-batches (`grads_accumulation`) are added, as in Burn.
///
/// Rank 0 validates, and writes Burn's output: metrics, summary and checkpoints. If ranks are processes, its training
/// metrics cover only its batches. If ranks are threads, they cover all batches.
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
    /// The rank of this process, if ranks are processes.
    pub(crate) process: Option<usize>,
    pub(crate) config: DataParallelConfig,
    pub(crate) devices: Vec<Device>,
    pub(crate) weight: Option<Box<WeightFn<M>>>,
    pub(crate) clip: f64,
    pub(crate) loss_scale: LossScale,
    /// The sharded optimizer; `None` uses the optimizer of the `Learner`.
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
    /// [`WorldError`] for 0 ranks, or too many.
    pub fn threads(ranks: usize) -> Result<Self, WorldError> {
        Ok(Self::of(World::threads(ranks)?))
    }

    /// Creates a strategy whose ranks are processes, started by `torchrun`, `mpirun`, `srun` or `burn-megatron launch`.
    ///
    /// If standard output is a terminal, ranks other than 0 are disconnected from it, because Burn's terminal interface
    /// would draw over the interface of rank 0. Standard error is not affected. Under mpirun, the interface of rank 0
    /// receives no keys, because the ranks run in the background.
    ///
    /// # Errors
    ///
    /// [`WorldError`] if no launcher has started this process, or its variables contradict each other.
    pub fn from_env() -> Result<Self, WorldError> {
        let launch = Launch::from_env()?.ok_or(WorldError::NotLaunched)?;
        Ok(Self::processes(launch))
    }

    /// Calls [`from_env`](Self::from_env) if a launcher has started this process, and [`threads`](Self::threads)
    /// otherwise.
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

    /// Creates a strategy like [`from_env`](Self::from_env), with a given place of this process in the world.
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

    /// Changes the world: the engine, the deadlines or the compute threads.
    pub fn world(mut self, change: impl FnOnce(World) -> World) -> Self {
        self.world = change(self.world);
        self
    }

    /// Sets the devices, which ranks use round-robin. By default, ranks use the device of the model.
    pub fn devices(mut self, devices: Vec<Device>) -> Self {
        self.devices = devices;
        self
    }

    /// Sets the weight of a batch in the mean over ranks, for example its number of tokens without padding. It must be
    /// the number over which the loss of the batch is a mean. By default, it is the number of items.
    pub fn weight(
        mut self,
        of: impl Fn(&<M as TrainStep>::Input) -> u64 + Send + Sync + 'static,
    ) -> Self {
        self.weight = Some(Box::new(of));
        self
    }

    /// Clips the 2-norm of the gradient of all parameters to `norm`. Burn's clipping, which is a setting of the
    /// optimizer, works per parameter.
    pub fn clip(mut self, norm: f64) -> Self {
        self.clip = norm;
        self
    }

    /// Sets the compute dtype of the model. Master weights and gradient sums are f32. With f16, the loss scale becomes
    /// dynamic, and the model must apply it with [`scale_loss`](crate::scale_loss).
    pub fn precision(mut self, precision: Precision) -> Self {
        self.config.precision = precision;
        if precision == Precision::F16 && self.loss_scale == LossScale::None {
            self.loss_scale = LossScale::Dynamic(Default::default());
        }
        self
    }

    /// Sets the loss scale, which the model must apply with [`scale_loss`](crate::scale_loss). Call it after
    /// [`precision`](Self::precision).
    pub fn loss_scale(mut self, loss_scale: LossScale) -> Self {
        self.loss_scale = loss_scale;
        self
    }

    /// Sets the ZeRO stage: shards the optimizer state (1), also the gradients (2), and also the parameters (3).
    /// Requires [`optimizer`](Self::optimizer), [`element_wise`](Self::element_wise) or
    /// [`optimizer_with`](Self::optimizer_with).
    pub fn zero_stage(mut self, stage: ZeroStage) -> Self {
        self.config.zero_stage = stage;
        self
    }

    /// Sets all settings of the data-parallel wrapper, such as buckets, overlap and hybrid sharding. Replaces the
    /// settings of [`precision`](Self::precision) and [`zero_stage`](Self::zero_stage).
    pub fn data_parallel(mut self, config: DataParallelConfig) -> Self {
        self.config = config;
        self
    }

    /// Steps sharded weights with an optimizer of this library: an `AdamWConfig`, or another [`OptimizerConfig`]. The
    /// optimizer of the `Learner` is then not called. The learning rate comes from the scheduler of the `Learner`.
    pub fn optimizer(self, config: impl Into<OptimizerConfig>) -> Self {
        let config = config.into();
        self.optimizer_with(move |ddp| ParallelOptimizer::new(&config, ddp))
    }

    /// Steps sharded weights like [`optimizer`](Self::optimizer), with an element-wise optimizer that implements Burn's
    /// trait: see [`ElementWise::new`](burn_megatron::optim::ElementWise::new). Checkpoints do not contain its state.
    pub fn element_wise<O: Optimizer + 'static>(
        self,
        build: impl Fn(f64) -> O + Send + Sync + 'static,
        groups: Vec<ParameterGroup>,
    ) -> Self {
        self.optimizer_with(move |ddp| ElementWise::new(&build, &groups, ddp))
    }

    /// Steps the weights like [`optimizer`](Self::optimizer), with a custom optimizer that `build` creates on each
    /// rank.
    pub fn optimizer_with<O: ShardedOptimizer<M> + 'static>(
        mut self,
        build: impl Fn(&DistributedDataParallel<M>) -> Result<O, OptimizerError> + Send + Sync + 'static,
    ) -> Self {
        self.optimizer = Some(Box::new(move |ddp| Ok(Box::new(build(ddp)?))));
        self
    }

    /// Saves the weights and the state of the [`optimizer`](Self::optimizer) after each epoch. Each rank saves its
    /// shards, and the last `keep` checkpoints are kept. `SupervisedTraining::checkpoint(epoch)` then resumes from
    /// them, with any number of ranks.
    pub fn checkpoints(mut self, folder: impl Into<PathBuf>, keep: usize) -> Self {
        let folder = folder.into();
        self.checkpoints = Some(CheckpointSettings { folder, keep });
        self
    }

    /// Returns whether this process has rank 0, which should save the model and print results after the training.
    pub fn is_main(&self) -> bool {
        self.process.is_none_or(|rank| rank == 0)
    }
}

/// Directs standard output to the null device if it is a terminal.
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

/// Allows this process to set the mode of its terminal while it runs in the background, as under mpirun. Otherwise the
/// system would stop the process. It receives no keys there.
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
