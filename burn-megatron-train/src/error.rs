//! Errors of a run.

use super::config::ConfigError;
use super::hooks::HookError;
use super::hooks::replay::ReplayError;
use burn_megatron::checkpoint::state::StateError;
use burn_megatron::comm::CommError;
use burn_megatron::data_parallel::DataParallelError;
use burn_megatron::device::DeviceError;
use burn_megatron::kernels::cuda_graph::CudaGraphError;
use burn_megatron::kernels::gemm::CpuGemm;
use burn_megatron::optim::{OptimizerError, TooManySkips};
use burn_megatron::pipeline::LayoutScheduleError;
use burn_megatron::pipeline::engine::EngineError;
use burn_megatron_data::DataError;
use burn_megatron_generate::GenerateError;

/// Why a run failed.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// Invalid settings.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// An error of the data.
    #[error(transparent)]
    Data(#[from] DataError),
    /// An error of the data-parallel wrapper.
    #[error(transparent)]
    DataParallel(#[from] DataParallelError),
    /// An error of the optimizer.
    #[error(transparent)]
    Optimizer(#[from] OptimizerError),
    /// Deferred readings with an optimizer that does not read the outcome of a step on the device.
    #[error(
        "deferred readings need the fused AdamW, but the optimizer of this run is another one, or unfused; fuse AdamW, \
         or do not defer"
    )]
    Unfused,
    /// Products on the CPU by a library whose results may depend on the addresses of its operands, in a deterministic run.
    #[error(
        "deterministic needs products of one order, which {0} does not promise; use gemm = gemm or mkl, or remove \
         deterministic"
    )]
    NoOrder(CpuGemm),
    /// Deferred readings with a setting that reads each step.
    #[error(
        "{setting} reads each step before it is taken, so readings cannot be deferred; remove one of the two"
    )]
    Deferred {
        /// The setting.
        setting: &'static str,
    },
    /// A hook that cannot be added or removed.
    #[error(transparent)]
    Hook(#[from] HookError),
    /// An error of a hook of the user.
    #[error("{0}")]
    OwnHook(Box<dyn std::error::Error + Send + Sync>),
    /// A check of a step found a wrong result.
    #[error(transparent)]
    Replay(#[from] ReplayError),
    /// Too many consecutive steps were skipped.
    #[error(transparent)]
    Skips(#[from] TooManySkips),
    /// Too many consecutive steps were skipped, as the loss is not finite.
    #[error("training diverged at step {step}, from which on no loss is finite: {skips}")]
    Diverged {
        /// The first step without a finite loss, from 1.
        step: usize,
        /// The number of skipped steps.
        skips: TooManySkips,
    },
    /// An error of the pipeline engine.
    #[error(transparent)]
    Pipeline(#[from] EngineError),
    /// A call of the device's graph functions that failed.
    #[error("cuda_graph: {0}; remove cuda_graph to train without graphs")]
    CudaGraph(CudaGraphError),
    /// A deferred weight gradient of a weight that the last stage does not have.
    #[error(
        "defer_embedding_wgrad needs the output layer's weight, and the last stage has no parameter {0}, which \
         LanguageModel::output_weight returns"
    )]
    OutputWeight(String),
    /// A deferred weight gradient of a model that names no such weight.
    #[error(
        "defer_embedding_wgrad needs the output layer's weight, and this model names none in \
         LanguageModel::output_weight; remove it"
    )]
    NoOutputWeight,
    /// The layout has no schedule for these sizes.
    #[error(transparent)]
    Schedule(#[from] LayoutScheduleError),
    /// The numbers of micro-batches of the schedule and of a step differ.
    #[error(
        "the schedule has {schedule} micro-batches: expected {micro_batches} per rank of the data axis"
    )]
    MicroBatches {
        /// The micro-batches of the schedule.
        schedule: usize,
        /// The micro-batches of a step.
        micro_batches: usize,
    },
    /// A task of the device failed, so later results are wrong.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// An error of text generation.
    #[error(transparent)]
    Generate(#[from] GenerateError),
    /// A communication error.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// An error of saving or loading a checkpoint.
    #[error(transparent)]
    State(#[from] StateError),
    /// An error of the observer.
    #[error("{0}")]
    Observer(Box<dyn std::error::Error + Send + Sync>),
}
