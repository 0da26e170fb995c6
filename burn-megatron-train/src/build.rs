//! Builds a trainer with one or more pipeline stages.

use burn::tensor::Device;

use super::config::{ConfigError, TrainConfig};
use super::hooks::cuda_graphs::{CudaGraphs, check_device};
use super::hooks::{BatchWarmupError, Hooks};
use super::micro_batches::{ContextPart, MicroBatchRunner};
use super::position::RunPosition;
use super::{TrainError, Trainer};
use burn_megatron::comm::ParallelContext;
use burn_megatron::data_parallel::DistributedDataParallel;
use burn_megatron::kernels::gemm::{Blas, CpuGemm};
use burn_megatron::model::LanguageModel;
use burn_megatron::nn::ParallelModule;
use burn_megatron::nn::tp_comm_overlap;
use burn_megatron::optim::{LossScaler, ParallelOptimizer};
use burn_megatron::pipeline::engine::DeferredWgrad;
use burn_megatron::pipeline::schedule::Schedule;
use burn_megatron::pipeline::schedule_of;

/// A pipeline schedule and its options.
#[derive(Clone, Debug)]
pub struct PipelineConfig {
    /// The pipeline schedule.
    pub schedule: Schedule,
    /// The maximum number of weight gradients of the output layer that the last stage defers to its cool-down phase. 0
    /// means that the number is not limited. `None` means that no gradient is deferred. Requires a schedule that
    /// computes the input gradients and weight gradients of a stage together.
    pub defer_embedding_wgrad: Option<usize>,
}

impl<M: LanguageModel> Trainer<M> {
    /// Creates a trainer for `model` on `device`. The pipeline schedule and the sharding follow from the layout of
    /// `groups`.
    ///
    /// # Errors
    ///
    /// [`TrainError`] if the settings are invalid for the layout or the model.
    pub fn new(
        model: ParallelModule<M>,
        groups: &ParallelContext,
        device: &Device,
        config: &TrainConfig,
    ) -> Result<Self, TrainError> {
        Self::wrap(model, groups, device, config, None)
    }

    /// Creates a trainer for the pipeline stages of `model` on this rank, with a custom schedule. The batch size must
    /// be constant.
    ///
    /// # Errors
    ///
    /// [`TrainError`] if the settings are invalid for the mesh, the model or the schedule.
    pub fn with_pipeline(
        model: ParallelModule<M>,
        groups: &ParallelContext,
        device: &Device,
        config: &TrainConfig,
        pipeline: PipelineConfig,
    ) -> Result<Self, TrainError> {
        check_micro_batches(&pipeline.schedule, config, groups)?;
        if let Some(part) = config.smaller_batches().first() {
            return Err(ConfigError::from(BatchWarmupError {
                part: *part,
                expected: "none, because a custom schedule has a fixed number of micro-batches"
                    .into(),
            })
            .into());
        }
        Self::wrap(model, groups, device, config, Some(pipeline))
    }

    /// Creates a trainer for a model that is already wrapped in a [`DistributedDataParallel`] with the settings
    /// `config.data_parallel`.
    ///
    /// # Errors
    ///
    /// The errors of [`with_pipeline`](Self::with_pipeline).
    pub fn from_wrapped(
        ddp: DistributedDataParallel<M>,
        device: &Device,
        config: &TrainConfig,
    ) -> Result<Self, TrainError> {
        check(config, ddp.groups(), ddp.module())?;
        let pipelines = Pipelines::new(config, ddp.groups())?;
        Self::build(ddp, device, config, pipelines)
    }

    /// Adds a hook that runs micro-batches in the same way as with CUDA graphs, but on a device without CUDA graphs.
    /// The model must be wrapped with static buffers. The dropout masks differ from the masks without this hook.
    ///
    /// # Errors
    ///
    /// [`TrainError`] if CUDA graphs do not support the layout or the model.
    pub fn with_graphs_on_host(self) -> Result<Self, TrainError> {
        self.with_hook(CudaGraphs::on_host())
    }

    fn wrap(
        model: ParallelModule<M>,
        groups: &ParallelContext,
        device: &Device,
        config: &TrainConfig,
        pipeline: Option<PipelineConfig>,
    ) -> Result<Self, TrainError> {
        let config = &config.in_layout(groups.config())?;
        check(config, groups, &model.module)?;
        if CudaGraphs::new(config).is_some() {
            check_device(groups, device, &model.position)?;
        }
        let pipelines = match pipeline {
            Some(own) => Pipelines {
                schedules: vec![own.schedule],
                defer_embedding_wgrad: own.defer_embedding_wgrad,
            },
            None => Pipelines::new(config, groups)?,
        };
        let ddp = DistributedDataParallel::with(model, groups, &config.data_parallel)?;
        Self::build(ddp, device, config, pipelines)
    }

    fn build(
        ddp: DistributedDataParallel<M>,
        device: &Device,
        config: &TrainConfig,
        pipelines: Pipelines,
    ) -> Result<Self, TrainError> {
        let gemm = ddp.kernels().blas().map(Blas::kind);
        let unordered = gemm.filter(|kind| matches!(kind, CpuGemm::OpenBlas | CpuGemm::Blis));
        if let Some(kind) = unordered.filter(|_| config.deterministic) {
            return Err(TrainError::NoOrder(kind));
        }
        let mut optimizer = ParallelOptimizer::new(&config.optimizer, &ddp)?;
        let deferred_wgrad = deferred_wgrad(&ddp, &pipelines)?;
        let runner = MicroBatchRunner::new(pipelines.schedules, deferred_wgrad, &ddp)?;
        let hooks = Hooks::of_run(config, &mut optimizer, &ddp)?;
        let mut trainer = Self {
            defers: optimizer.is_fused()
                && *device != Device::flex()
                && hooks.deferral_error().is_none(),
            optimizer,
            scaler: LossScaler::new(&config.loss_scale()).map_err(ConfigError::from)?,
            position: RunPosition::new(config).map_err(ConfigError::from)?,
            runner,
            hooks,
            ddp,
            config: config.clone(),
            device: device.clone().inner(),
            bytes_per_token: 1.0,
            saver: None,
        };
        let (hooks, context) = trainer.split(0);
        hooks.check(&context)?;
        Ok(trainer)
    }
}

fn check(
    config: &TrainConfig,
    groups: &ParallelContext,
    model: &impl LanguageModel,
) -> Result<(), ConfigError> {
    config.check(groups.config(), model.context())?;
    let length = config.sequence_length.unwrap_or(model.context());
    let part = ContextPart::of(groups, 0);
    for length in config.row_lengths(length) {
        part.check(length)?;
        tp_comm_overlap::check(groups.config(), length)?;
    }
    Ok(())
}

/// Checks that a schedule has the number of micro-batches that a rank has per step.
fn check_micro_batches(
    schedule: &Schedule,
    config: &TrainConfig,
    groups: &ParallelContext,
) -> Result<(), TrainError> {
    let share = config.global_batch_size / groups.data().size();
    let micro_batches = share / config.micro_batch_size.max(1);
    match schedule.micro_batches() {
        schedule if schedule != micro_batches => Err(TrainError::MicroBatches {
            schedule,
            micro_batches,
        }),
        _ => Ok(()),
    }
}

/// The pipeline schedules of a run.
struct Pipelines {
    /// One schedule per batch size.
    schedules: Vec<Schedule>,
    defer_embedding_wgrad: Option<usize>,
}

impl Pipelines {
    /// Builds the pipelines of the layout. A pipeline of one stage runs the forward and the backward of one micro-batch
    /// after another.
    fn new(config: &TrainConfig, groups: &ParallelContext) -> Result<Self, TrainError> {
        let layout = groups.config();
        let sizes = config.batch_sizes();
        let schedules = sizes.map(|size| {
            let share = size / groups.data().size();
            schedule_of(layout, share / config.micro_batch_size)
        });
        Ok(Self {
            schedules: schedules.collect::<Result<_, _>>()?,
            defer_embedding_wgrad: layout.defer_embedding_wgrad,
        })
    }
}

/// Returns the deferred weight gradient, on the rank of the last stage.
fn deferred_wgrad<M: LanguageModel>(
    ddp: &DistributedDataParallel<M>,
    pipelines: &Pipelines,
) -> Result<Option<DeferredWgrad>, TrainError> {
    // All schedules have the last stage on the same rank.
    let Some(schedule) = pipelines.schedules.last() else {
        return Ok(None);
    };
    let last = schedule.rank_of(schedule.stages() - 1);
    let Some(limit) = pipelines
        .defer_embedding_wgrad
        .filter(|_| ddp.groups().pipeline().rank() == last)
    else {
        return Ok(None);
    };
    let Some(path) = ddp.module().output_weight() else {
        return Err(TrainError::NoOutputWeight);
    };
    match ddp.table().index(path) {
        Some(index) => Ok(Some(DeferredWgrad { index, limit })),
        None => Err(TrainError::OutputWeight(path.into())),
    }
}
