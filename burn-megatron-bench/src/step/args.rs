//! The flags of `step`.

use std::path::PathBuf;

use burn_megatron::data_parallel::Precision;
use burn_megatron::device::DeviceKind;
use burn_megatron::kernel_selection::AttentionChoice;
use burn_megatron_cli::internal::{NamedModel, SetArgs, at_least_one, precision};
use clap::Args;

use crate::args::above_zero;

/// Flags of `step`.
#[derive(Args)]
pub struct StepBenchArgs {
    /// Device: cpu, wgpu or cuda. wgpu and cuda must be compiled in.
    #[arg(long, default_value_t = DeviceKind::Cpu)]
    pub device: DeviceKind,
    /// Models to time: GPT-2 models of several sizes, and byte-level Llamas. Default: tiny on a CPU, 124m on other
    /// devices.
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        value_name = "NAME,..",
        conflicts_with = "recipe"
    )]
    pub model: Vec<NamedModel>,
    /// Recipe that contains the model and the training settings, instead of --model. Its layout must have one rank.
    #[arg(long, visible_alias = "config", value_name = "FILE.toml")]
    pub recipe: Option<PathBuf>,
    /// Flags that set keys of the recipe.
    #[command(flatten)]
    pub set: SetArgs,
    /// Number of samples per micro-batch. Default: the number in the recipe.
    #[arg(long, value_delimiter = ',', value_name = "N,..", value_parser = at_least_one)]
    pub micro_batch_size: Vec<usize>,
    /// Number of micro-batches per step.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_one)]
    pub micro_batches: usize,
    /// Compute dtype of the model. Default: f32 on a CPU, bf16 on other devices.
    #[arg(long, value_name = "f64|f32|bf16|f16", value_parser = precision)]
    pub precision: Option<Precision>,
    /// Implementations of attention to time: auto, unfused, or the name of an engine (mma or portable).
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "CHOICE,..",
        default_value = "auto"
    )]
    pub attention: Vec<AttentionChoice>,
    /// Operations that use fused kernels, and the matrix multiplication library on the CPU. See `pretrain --help`.
    #[arg(long, value_name = "CHOICE|OPERATION=CHOICE,..")]
    pub kernels: Vec<String>,
    /// Number of measured steps. The median is reported.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = at_least_one)]
    pub steps: usize,
    /// Number of warm-up steps before the measured steps.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = at_least_one)]
    pub warm_up: usize,
    /// Python interpreter with torch. If it is set, PyTorch trains the same model on the CPU in alternation with this
    /// program, in eager mode with the same number of threads.
    #[arg(long, value_name = "PATH")]
    pub python: Option<PathBuf>,
    /// Number of rounds with --python. In each round, this program and PyTorch both run all steps. The median over the
    /// rounds of the ratio of the step times is reported.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_one)]
    pub rounds: usize,
    /// Peak throughput of the device in TFLOP/s, from which the MFU is computed. Default: the published peak, if the
    /// GPU is known.
    #[arg(long, value_name = "TFLOP/S", value_parser = above_zero)]
    pub peak_tflops: Option<f64>,
    /// Write the results to this file as JSON, which burn-megatron-bench/python/torch_step.py reads.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}
