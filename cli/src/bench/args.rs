//! The flags of `bench kernels` and `bench overlap`.

use std::path::PathBuf;

use burn_megatron::data_parallel::ZeroStage;
use burn_megatron::device::DeviceKind;
use clap::{Args, ValueEnum};

use super::Shape;

/// Flags of `bench kernels`.
#[derive(Args)]
pub struct BenchArgs {
    /// Where the kernels run: cpu, wgpu or cuda. The last two must be compiled in.
    #[arg(long, default_value_t = DeviceKind::Cpu)]
    pub device: DeviceKind,
    /// The type of the tensors; AdamW and matrix products are timed in f32.
    #[arg(long, value_enum, default_value_t = BenchDtype::F32)]
    pub dtype: BenchDtype,
    /// Sizes, such as 4096x1024 (tokens x features); the default is a grid that suits the device.
    #[arg(long, value_delimiter = ',', value_name = "ROWSxWIDTH")]
    pub sizes: Vec<Shape>,
    /// Only these: names from the table, or an operation as --kernels names it; fp8 is all that has to do
    /// with 8 bits.
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    pub only: Vec<String>,
    /// Runs of which the median counts.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = at_least_one)]
    pub samples: usize,
    /// Milliseconds of runs that do not count before them.
    #[arg(long, value_name = "MS", default_value_t = 200)]
    pub warm_up_ms: u64,
    /// Where the figures go as JSON, which cli/bench/torch_kernels.py reads.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// Flags of `bench overlap`.
#[derive(Args)]
pub struct OverlapArgs {
    /// Blocks of the model.
    #[arg(long, value_name = "N", default_value_t = 12)]
    pub layers: usize,
    /// Features of its residual stream.
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub hidden: usize,
    /// Tokens of a sample.
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub context: usize,
    /// Samples of a rank and step.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = at_least_one)]
    pub samples: usize,
    /// Ranks that share the batch, each with one compute thread; 2 at the least.
    #[arg(long, visible_alias = "dp", value_name = "N", default_value_t = 2)]
    pub data_parallel: usize,
    /// Steps of each case that count.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = at_least_one)]
    pub steps: usize,
    /// Steps before them that do not count.
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub warm_up: usize,
    /// What is sharded: 0 nothing, 1 the optimizer, 2 its gradients too, 3 the parameters as well.
    #[arg(long, value_delimiter = ',', value_name = "STAGE", default_values_t = ZeroStage::ALL)]
    pub zero_stages: Vec<ZeroStage>,
    /// Elements of a bucket of gradients; a twelfth of the model by default, and for stage 3 a block
    /// of it.
    #[arg(long, value_name = "ELEMENTS")]
    pub bucket_size: Option<usize>,
    /// Latency of each call in microseconds.
    #[arg(long, value_name = "US", default_value_t = 100)]
    pub latency_us: u64,
    /// How long the transfers of a step of stage 0 take, as a fraction of the time of its backward.
    /// The bandwidth follows from it: before each stage, some steps without a link are measured. Stage
    /// 3 sends half as much again.
    #[arg(long, value_name = "FRACTION", default_value_t = 0.6, value_parser = above_zero)]
    pub share: f64,
    /// The bandwidth of each rank's link in MB/s (1e6 bytes), in place of --share.
    #[arg(long, value_name = "MB/S", conflicts_with = "share", value_parser = above_zero)]
    pub bandwidth_mb_s: Option<f64>,
    /// Folder for a trace of each case, overlap-STAGE.json and overlap-STAGE-off.json, that Perfetto
    /// and Chrome read.
    #[arg(long, value_name = "DIR")]
    pub trace: Option<PathBuf>,
    /// Where a picture of one step of each case goes.
    #[arg(long, value_name = "FILE.svg")]
    pub svg: Option<PathBuf>,
    /// Where the figures go as JSON.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// A type that kernels are timed in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BenchDtype {
    /// 32 bits.
    F32,
    /// 16 bits, IEEE.
    F16,
    /// 16 bits, the range of f32.
    Bf16,
}

impl BenchDtype {
    /// As the flag writes it.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("0 runs have no median; 1 and more do".into()),
        Ok(samples) => Ok(samples),
        Err(error) => Err(format!("{error}")),
    }
}

fn above_zero(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number > 0.0 && number.is_finite() => Ok(number),
        Ok(number) => Err(format!("{number} makes no link; a number above 0 does")),
        Err(error) => Err(format!("{error}")),
    }
}
