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
    /// Device: cpu, wgpu or cuda. The last two must be compiled in.
    #[arg(long, default_value_t = DeviceKind::Cpu)]
    pub device: DeviceKind,
    /// Models with the shapes of GPT-2, and Llamas over bytes; by default tiny on a CPU, 124m elsewhere.
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        value_name = "NAME,..",
        conflicts_with = "recipe"
    )]
    pub model: Vec<NamedModel>,
    /// The model and the training settings of this recipe instead; it must be for one rank.
    #[arg(long, visible_alias = "config", value_name = "FILE.toml")]
    pub recipe: Option<PathBuf>,
    /// Keys of the recipe.
    #[command(flatten)]
    pub set: SetArgs,
    /// Samples per micro-batch; by default the number in the model's recipe.
    #[arg(long, value_delimiter = ',', value_name = "N,..", value_parser = at_least_one)]
    pub micro_batch_size: Vec<usize>,
    /// Micro-batches per step.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_one)]
    pub micro_batches: usize,
    /// The type that the model computes in; by default f32 on a CPU, bf16 elsewhere.
    #[arg(long, value_name = "f64|f32|bf16|f16", value_parser = precision)]
    pub precision: Option<Precision>,
    /// Forms of attention, each timed: auto, unfused, or an engine (mma, portable).
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "CHOICE,..",
        default_value = "auto"
    )]
    pub attention: Vec<AttentionChoice>,
    /// Which operations use fused kernels, and what multiplies matrices on the CPU; see `pretrain --help`.
    #[arg(long, value_name = "CHOICE|OPERATION=CHOICE,..")]
    pub kernels: Vec<String>,
    /// Measured steps, of which the median is reported.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = at_least_one)]
    pub steps: usize,
    /// Warm-up steps before them.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = at_least_one)]
    pub warm_up: usize,
    /// A Python with torch, which trains the same model in turns on a CPU, in eager mode with the same number of threads.
    #[arg(long, value_name = "PATH")]
    pub python: Option<PathBuf>,
    /// Rounds of these turns, each of all its steps; the ratio is the median of theirs.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_one)]
    pub rounds: usize,
    /// The peak of the device in TFLOP/s, for the MFU; by default the published peak of a known GPU.
    #[arg(long, value_name = "TFLOP/S", value_parser = above_zero)]
    pub peak_tflops: Option<f64>,
    /// Write the results to this file as JSON, which burn-megatron-bench/python/torch_step.py reads.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}
