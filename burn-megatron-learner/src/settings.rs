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

/// Data parallelism, with or without sharding, as a training strategy of Burn's `Learner`.
///
/// Rank `r` of `R` reads the items `[N r / R, N (r + 1) / R)` of the `N` training items, in batches of the loader's size,
/// so a step has `R` batches. Its gradient is the mean of the ranks' gradients, weighted by their items, or by
/// [`weight`](Self::weight): for a loss that is a mean over the batch, the gradient of the mean loss over all batches of the
/// step. Accumulated micro-batches (`grads_accumulation`) are added, as Burn does.
///
/// Rank 0 validates, and writes what Burn writes: metrics, summary, its checkpoints. If ranks are processes, its
/// training metrics are those of its own batches; if they are threads, of all.
pub struct MegatronStrategy<M: LearnerModel> {
    pub(crate) world: World,
    /// The rank of this process, if ranks are processes.
    pub(crate) process: Option<usize>,
    pub(crate) config: DataParallelConfig,
    pub(crate) devices: Vec<Device>,
    pub(crate) weight: Option<Box<WeightFn<M>>>,
    pub(crate) clip: f64,
    pub(crate) loss_scale: LossScale,
    /// `None` for the optimizer of the `Learner`.
    pub(crate) optimizer: Option<Box<BuildOptimizer<M>>>,
    pub(crate) checkpoints: Option<CheckpointSettings>,
}

impl<M: LearnerModel> From<MegatronStrategy<M>> for TrainingStrategy<M> {
    fn from(strategy: MegatronStrategy<M>) -> Self {
        Self::Custom(Arc::new(strategy))
    }
}

impl<M: LearnerModel> MegatronStrategy<M> {
    /// Ranks that are threads of this process.
    ///
    /// # Errors
    ///
    /// [`WorldError`] for 0 ranks, or too many.
    pub fn threads(ranks: usize) -> Result<Self, WorldError> {
        Ok(Self::of(World::threads(ranks)?))
    }

    /// Ranks that are processes, of which `torchrun`, `mpirun`, `srun` or `burn-megatron launch` has started this one.
    ///
    /// If standard output is a terminal, ranks other than 0 lose it: Burn's terminal interface would draw over that of
    /// rank 0. Standard error stays. Under mpirun the interface of rank 0 gets no keys: the ranks run in the background.
    ///
    /// # Errors
    ///
    /// [`WorldError`] if no launcher has started this process, or its variables contradict each other.
    pub fn from_env() -> Result<Self, WorldError> {
        let launch = Launch::from_env()?.ok_or(WorldError::NotLaunched)?;
        Ok(Self::processes(launch))
    }

    /// [`from_env`](Self::from_env) in a process that a launcher has started, and otherwise [`threads`](Self::threads).
    ///
    /// # Errors
    ///
    /// See there.
    pub fn from_env_or_threads(ranks: usize) -> Result<Self, WorldError> {
        match Launch::from_env()? {
            Some(launch) => Ok(Self::processes(launch)),
            None => Self::threads(ranks),
        }
    }

    /// [`from_env`](Self::from_env) with the place of this process in the world as a value.
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

    /// Changes the world: its engine, deadlines or compute threads.
    pub fn world(mut self, change: impl FnOnce(World) -> World) -> Self {
        self.world = change(self.world);
        self
    }

    /// The devices, which ranks use round-robin; by default that of the model.
    pub fn devices(mut self, devices: Vec<Device>) -> Self {
        self.devices = devices;
        self
    }

    /// The weight of a batch, such as its tokens without padding, in the mean over the ranks. It is the number over which
    /// the loss of the batch is a mean. By default the items of the batch.
    pub fn weight(
        mut self,
        of: impl Fn(&<M as TrainStep>::Input) -> u64 + Send + Sync + 'static,
    ) -> Self {
        self.weight = Some(Box::new(of));
        self
    }

    /// Clips the gradient to this 2-norm over the whole model. Burn's own clipping, which is set in the optimizer, is by
    /// parameter.
    pub fn clip(mut self, norm: f64) -> Self {
        self.clip = norm;
        self
    }

    /// The dtype in which the model computes; masters and gradient sums are f32. With f16 the loss scale becomes dynamic,
    /// and the model has to apply it by [`scale_loss`](crate::scale_loss).
    pub fn precision(mut self, precision: Precision) -> Self {
        self.config.precision = precision;
        if precision == Precision::F16 && self.loss_scale == LossScale::None {
            self.loss_scale = LossScale::Dynamic(Default::default());
        }
        self
    }

    /// The loss scale, which the model has to apply by [`scale_loss`](crate::scale_loss). Call it after
    /// [`precision`](Self::precision).
    pub fn loss_scale(mut self, loss_scale: LossScale) -> Self {
        self.loss_scale = loss_scale;
        self
    }

    /// Sets the sharding: the optimizer state (1), the gradients too (2), the parameters too (3). It requires
    /// [`optimizer`](Self::optimizer), or one of the other two methods that set one.
    pub fn zero_stage(mut self, stage: ZeroStage) -> Self {
        self.config.zero_stage = stage;
        self
    }

    /// All settings of the wrapper: buckets, overlap, hybrid sharding and others. It replaces what
    /// [`precision`](Self::precision) and [`zero_stage`](Self::zero_stage) have set.
    pub fn data_parallel(mut self, config: DataParallelConfig) -> Self {
        self.config = config;
        self
    }

    /// Steps the weights on shards by an optimizer of this library: an `AdamWConfig`, or one of the others of
    /// [`OptimizerConfig`]. The optimizer of the `Learner` is then not called; the learning rate is that of its scheduler.
    pub fn optimizer(self, config: impl Into<OptimizerConfig>) -> Self {
        let config = config.into();
        self.optimizer_with(move |ddp| ParallelOptimizer::new(&config, ddp))
    }

    /// As [`optimizer`](Self::optimizer), by any element-wise optimizer that implements Burn's trait: see
    /// [`ElementWise::new`](burn_megatron::optim::ElementWise::new). Its state is not in checkpoints.
    pub fn element_wise<O: Optimizer + 'static>(
        self,
        build: impl Fn(f64) -> O + Send + Sync + 'static,
        groups: Vec<ParameterGroup>,
    ) -> Self {
        self.optimizer_with(move |ddp| ElementWise::new(&build, &groups, ddp))
    }

    /// As [`optimizer`](Self::optimizer), by one of your own, which `build` makes on each rank.
    pub fn optimizer_with<O: ShardedOptimizer<M> + 'static>(
        mut self,
        build: impl Fn(&DistributedDataParallel<M>) -> Result<O, OptimizerError> + Send + Sync + 'static,
    ) -> Self {
        self.optimizer = Some(Box::new(move |ddp| Ok(Box::new(build(ddp)?))));
        self
    }

    /// Saves the weights and the state of the [`optimizer`](Self::optimizer) after each epoch, each rank its shards, and keeps the last
    /// `keep`. `SupervisedTraining::checkpoint(epoch)` then resumes from here, with any number of ranks.
    pub fn checkpoints(mut self, folder: impl Into<PathBuf>, keep: usize) -> Self {
        let folder = folder.into();
        self.checkpoints = Some(CheckpointSettings { folder, keep });
        self
    }

    /// Whether this process has rank 0: the one to save the model and to print results after the training.
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
        // SAFETY: both are open descriptors of this process, and the second one stays so.
        unsafe { libc::dup2(null.as_raw_fd(), libc::STDOUT_FILENO) };
    }
}

/// Lets this process set the mode of its terminal if it runs in the background of it, as ranks of mpirun do: the system would
/// stop it. It reads no keys there.
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
