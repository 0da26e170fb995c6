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

/// An error of a run.
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
    /// Deferred readings require the fused AdamW optimizer.
    #[error(
        "deferred readings require the fused AdamW, but this run uses another optimizer, or an unfused one; fuse \
         AdamW, or do not defer"
    )]
    Unfused,
    /// A deterministic run requires a matrix multiplication library whose results do not depend on memory addresses.
    #[error(
        "deterministic requires matrix products with a fixed order of sums, which {0} does not guarantee; use gemm = \
         gemm or mkl, or remove deterministic"
    )]
    NoOrder(CpuGemm),
    /// Deferred readings conflict with a setting that reads each step.
    #[error(
        "{setting} reads each step before it is taken, so readings cannot be deferred; remove one of the two"
    )]
    Deferred {
        /// The setting.
        setting: &'static str,
    },
    /// A hook cannot be added or removed.
    #[error(transparent)]
    Hook(#[from] HookError),
    /// An error of a custom hook.
    #[error("{0}")]
    OwnHook(Box<dyn std::error::Error + Send + Sync>),
    /// A check of a step found a wrong result.
    #[error(transparent)]
    Replay(#[from] ReplayError),
    /// Too many consecutive steps were skipped.
    #[error(transparent)]
    Skips(#[from] TooManySkips),
    /// Too many consecutive steps were skipped because the loss is not finite.
    #[error("training diverged at step {step}, from which on no loss is finite: {skips}")]
    Diverged {
        /// The first of the steps without a finite loss, from 1.
        step: usize,
        /// The number of skipped steps.
        skips: TooManySkips,
    },
    /// An error of the pipeline engine.
    #[error(transparent)]
    Pipeline(#[from] EngineError),
    /// A call of the device's graph functions failed.
    #[error("cuda_graph: {0}; remove cuda_graph to train without graphs")]
    CudaGraph(CudaGraphError),
    /// The last stage does not have the parameter whose weight gradient is deferred.
    #[error(
        "defer_embedding_wgrad requires the output layer's weight, but the last stage has no parameter {0}, which \
         LanguageModel::output_weight returns"
    )]
    OutputWeight(String),
    /// The model does not name an output weight, but its weight gradient is deferred.
    #[error(
        "defer_embedding_wgrad requires the output layer's weight, but LanguageModel::output_weight of this model \
         returns none; remove defer_embedding_wgrad"
    )]
    NoOutputWeight,
    /// The layout has no schedule for these sizes.
    #[error(transparent)]
    Schedule(#[from] LayoutScheduleError),
    /// The schedule has a different number of micro-batches than a step.
    #[error(
        "the schedule has {schedule} micro-batches: expected {micro_batches} per rank of the data axis"
    )]
    MicroBatches {
        /// The micro-batches of the schedule.
        schedule: usize,
        /// The micro-batches of a step.
        micro_batches: usize,
    },
    /// A task of the device failed, so all later results are wrong.
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
