//! Errors of a training run.

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

/// The error of a training run that failed or could not start.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The settings are invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The training data could not be read.
    #[error(transparent)]
    Data(#[from] DataError),
    /// An error of the data-parallel wrapper.
    #[error(transparent)]
    DataParallel(#[from] DataParallelError),
    /// An error of the optimizer.
    #[error(transparent)]
    Optimizer(#[from] OptimizerError),
    /// Deferred readings of step statistics were requested, but the optimizer is not the fused AdamW.
    #[error(
        "deferred readings require the fused AdamW, but this run uses another optimizer, or an unfused one; fuse \
         AdamW, or do not defer readings"
    )]
    Unfused,
    /// A deterministic run was requested, but the results of the matrix multiplication library may depend on memory
    /// addresses.
    #[error(
        "deterministic requires matrix products with a fixed order of sums, which {0} does not guarantee; use gemm = \
         gemm or mkl, or remove deterministic"
    )]
    NoOrder(CpuGemm),
    /// Deferred readings conflict with a setting that reads the statistics of each step before its update.
    #[error(
        "{setting} reads each step before it is taken, so readings cannot be deferred; remove one of the two"
    )]
    Deferred {
        /// The name of the setting.
        setting: &'static str,
    },
    /// A hook cannot be added or removed.
    #[error(transparent)]
    Hook(#[from] HookError),
    /// An error of a custom hook.
    #[error("{0}")]
    OwnHook(Box<dyn std::error::Error + Send + Sync>),
    /// A replay check found a wrong result.
    #[error(transparent)]
    Replay(#[from] ReplayError),
    /// Too many consecutive steps were skipped.
    #[error(transparent)]
    Skips(#[from] TooManySkips),
    /// Too many consecutive steps were skipped because the loss is not finite.
    #[error("training diverged at step {step}, from which on no loss is finite: {skips}")]
    Diverged {
        /// The first step, counted from 1, since which no loss has been finite.
        step: usize,
        /// The numbers of skipped steps and of steps that updated the weights.
        skips: TooManySkips,
    },
    /// An error of the pipeline engine.
    #[error(transparent)]
    Pipeline(#[from] EngineError),
    /// A call of a CUDA graph function failed.
    #[error("cuda_graph: {0}; remove cuda_graph to train without graphs")]
    CudaGraph(CudaGraphError),
    /// `defer_embedding_wgrad` is set, but the last stage does not have the output weight that the model names.
    #[error(
        "defer_embedding_wgrad requires the output layer's weight, but the last stage has no parameter {0}, which \
         LanguageModel::output_weight returns"
    )]
    OutputWeight(String),
    /// `defer_embedding_wgrad` is set, but the model does not name an output weight.
    #[error(
        "defer_embedding_wgrad requires the output layer's weight, but LanguageModel::output_weight of this model \
         returns none; remove defer_embedding_wgrad"
    )]
    NoOutputWeight,
    /// The pipeline schedule of the layout cannot be created.
    #[error(transparent)]
    Schedule(#[from] LayoutScheduleError),
    /// The schedule has a different number of micro-batches than a step.
    #[error(
        "the schedule has {schedule} micro-batches: expected {micro_batches} per rank of the data axis"
    )]
    MicroBatches {
        /// The number of micro-batches of the schedule.
        schedule: usize,
        /// The number of micro-batches that a rank has per step.
        micro_batches: usize,
    },
    /// A task of the device has failed, so all later results can be wrong.
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
