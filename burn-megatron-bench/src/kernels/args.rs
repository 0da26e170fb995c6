//! The flags of `kernels`.

use std::path::PathBuf;

use burn_megatron::device::DeviceKind;
use burn_megatron::kernel_selection::{AttentionChoice, KernelChoice};
use burn_megatron_cli::internal::{Shape, at_least_one};
use clap::Args;

use crate::args::BenchDtype;

/// Flags of `kernels`.
#[derive(Args)]
pub struct KernelBenchArgs {
    /// Device: cpu, wgpu or cuda. wgpu and cuda must be compiled in.
    #[arg(long, default_value_t = DeviceKind::Cpu)]
    pub device: DeviceKind,
    /// Type of the tensors. AdamW and the accumulated weight gradients are always in f32.
    #[arg(long, value_enum, default_value_t = BenchDtype::F32)]
    pub dtype: BenchDtype,
    /// Engines of causal attention to time: mma or portable. Default: auto, the engine that training uses.
    #[arg(long, value_delimiter = ',', value_name = "CHOICE,..", default_value = "auto", value_parser = attention_engine)]
    pub attention: Vec<AttentionChoice>,
    /// Sizes as tokens x features, such as 4096x1024. Default: a grid for the device.
    #[arg(long, value_delimiter = ',', value_name = "ROWSxWIDTH,..")]
    pub sizes: Vec<Shape>,
    /// Run only these benchmarks: names from the table, operations as in --kernels, fp8 for all FP8 benchmarks, or moe
    /// for all expert benchmarks.
    #[arg(long, value_delimiter = ',', value_name = "NAME,..")]
    pub only: Vec<String>,
    /// Number of measured runs. The median is reported.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = at_least_one)]
    pub repeats: usize,
    /// Milliseconds of warm-up runs before the measured runs.
    #[arg(long, value_name = "MS", default_value_t = 200)]
    pub warm_up_ms: u64,
    /// Write the results to this file as JSON after each row. burn-megatron-bench/python/torch_kernels.py reads the
    /// file.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// Parses `auto` or an engine of fused attention.
fn attention_engine(text: &str) -> Result<AttentionChoice, String> {
    match text.parse() {
        Ok(AttentionChoice::Form(KernelChoice::Unfused)) => Err(
            "expected auto, mma or portable; the column `composed` measures unfused attention"
                .into(),
        ),
        choice => choice.map_err(|error| format!("{error}")),
    }
}
