//! The flags of `kernels`, `overlap`, `pipeline`, `context` and `dispatch`.

use std::path::PathBuf;

use burn_megatron::data_parallel::ZeroStage;
use burn_megatron::device::DeviceKind;
use burn_megatron::kernel_selection::{AttentionChoice, KernelChoice};
use burn_megatron::mesh::{ContextExchange, ScheduleKind};
use burn_megatron::nn::moe::Fp8DispatchScales;
use clap::{Args, ValueEnum};
use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde::de::value::{Error as ValueError, StrDeserializer};

use super::overlap::tensor::TpCommOverlapSetting;
use burn_megatron_cli::internal::NcclFlags;
use burn_megatron_cli::internal::RankArgs;
use burn_megatron_cli::internal::SetArgs;
use burn_megatron_cli::internal::Shape;
pub use burn_megatron_cli::internal::at_least_one;

/// Flags of `kernels`.
#[derive(Args)]
pub struct BenchArgs {
    /// Device: cpu, wgpu or cuda. The last two must be compiled in.
    #[arg(long, default_value_t = DeviceKind::Cpu)]
    pub device: DeviceKind,
    /// The type of the tensors. AdamW and the sums of weight gradients are in f32 in every run.
    #[arg(long, value_enum, default_value_t = BenchDtype::F32)]
    pub dtype: BenchDtype,
    /// Engines of causal attention, each timed: mma or portable. The default, auto, is the engine that training uses.
    #[arg(long, value_delimiter = ',', value_name = "CHOICE,..", default_value = "auto", value_parser = attention_engine)]
    pub attention: Vec<AttentionChoice>,
    /// Sizes, such as 4096x1024 (tokens x features); the default is a grid for the device.
    #[arg(long, value_delimiter = ',', value_name = "ROWSxWIDTH,..")]
    pub sizes: Vec<Shape>,
    /// Only these: names from the table, operations as in --kernels, fp8 for all 8-bit benchmarks, or moe for those of
    /// experts.
    #[arg(long, value_delimiter = ',', value_name = "NAME,..")]
    pub only: Vec<String>,
    /// Measured runs, of which the median is reported.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = at_least_one)]
    pub repeats: usize,
    /// Milliseconds of warm-up runs before them.
    #[arg(long, value_name = "MS", default_value_t = 200)]
    pub warm_up_ms: u64,
    /// Write the results to this file as JSON after each row; burn-megatron-bench/python/torch_kernels.py reads the file.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// Flags of `overlap`.
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
    /// Samples per rank and step.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = at_least_one)]
    pub micro_batch_size: usize,
    /// Number of data-parallel ranks, each with one compute thread; at least 2.
    #[arg(long, visible_alias = "dp", value_name = "N", default_value_t = 2)]
    pub data_parallel: usize,
    /// Ranks of a node; the link inside of a node is eight times as fast. Gradients are then summed by way of nodes with
    /// stage 0 (hierarchical_reduce), and shards stay in a node with the others (hsdp).
    #[arg(long, value_name = "N", conflicts_with = "model_axis", value_parser = at_least_one)]
    pub ranks_per_node: Option<usize>,
    /// Measure tensor-parallel overlap instead, of MLPs under sequence parallelism on so many tensor ranks.
    #[arg(
        long,
        visible_alias = "tp",
        value_delimiter = ',',
        value_name = "N,..",
        group = "model_axis",
        conflicts_with_all = ["data_parallel", "zero_stages", "bucket_size", "bandwidth_mb_s", "trace", "svg"]
    )]
    pub tensor_parallel: Vec<usize>,
    /// Measure overlap of the exchanges of experts with another micro-batch instead, on so many ranks.
    #[arg(
        long,
        visible_alias = "ep",
        value_delimiter = ',',
        value_name = "N,..",
        group = "model_axis",
        conflicts_with_all = ["data_parallel", "zero_stages", "bucket_size", "bandwidth_mb_s", "trace", "svg", "engine"]
    )]
    pub expert_parallel: Vec<usize>,
    /// Micro-batches of a step with --expert-parallel, each of --micro-batch-size samples.
    #[arg(long, value_name = "M", default_value_t = 8, requires = "expert_parallel", value_parser = at_least_one)]
    pub micro_batches: usize,
    /// The split of the exchanges of --tensor-parallel into chunks: none, ring, bulk (the number of chunks follows from
    /// the sizes), ring:N or bulk:N.
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "NAME,..",
        default_value = "none,ring,bulk:8",
        requires = "tensor_parallel"
    )]
    pub tp_comm_overlap: Vec<TpCommOverlapSetting>,
    /// Count the time of the products and transfers of --tensor-parallel or --expert-parallel on a virtual clock, as is done in
    /// any case for more threads than cores.
    #[arg(long, requires = "model_axis")]
    pub counted: bool,
    /// Measured steps of each case.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = at_least_one)]
    pub steps: usize,
    /// Warm-up steps before them.
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub warm_up: usize,
    /// ZeRO stages: 0 shards nothing, 1 the optimizer, 2 also gradients, 3 also parameters.
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "STAGE,..",
        default_value = "0,1,2,3"
    )]
    pub zero_stages: Vec<ZeroStage>,
    /// Elements per gradient bucket; by default a twelfth of the model, and a block for stage 3.
    #[arg(long, value_name = "ELEMENTS")]
    pub bucket_size: Option<usize>,
    /// Latency of each collective in microseconds.
    #[arg(long, value_name = "US", default_value_t = 100)]
    pub latency_us: u64,
    /// Time of the transfers of a step at stage 0, as a fraction of its backward. The bandwidth is computed from
    /// it: before each stage, steps without a link are measured. Stage 3 sends half as much again. With
    /// --tensor-parallel and --expert-parallel: as a fraction of the whole step without a link.
    #[arg(long, value_name = "FRACTION", default_value_t = 0.6, value_parser = above_zero)]
    pub share: f64,
    /// Bandwidth of each rank's link in MB/s (1e6 bytes), instead of --share.
    #[arg(long, value_name = "MB/S", conflicts_with = "share", value_parser = above_zero)]
    pub bandwidth_mb_s: Option<f64>,
    /// Write a trace of each case, for Perfetto and Chrome, to this folder: overlap-STAGE.json and
    /// overlap-STAGE-off.json.
    #[arg(long, value_name = "DIR")]
    pub trace: Option<PathBuf>,
    /// Write a plot of one step of each case to this file.
    #[arg(long, value_name = "FILE.svg")]
    pub svg: Option<PathBuf>,
    /// Write the results to this file as JSON.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// The ranks of --tensor-parallel: threads, or processes that a launcher started.
    #[command(flatten)]
    pub world: RankArgs,
    /// The settings of NCCL.
    #[command(flatten)]
    pub nccl: NcclFlags,
}

/// Flags of `pipeline`.
#[derive(Args)]
pub struct PipelineBenchArgs {
    /// Ranks of the pipeline.
    #[arg(long, visible_alias = "pp", value_name = "N", default_value_t = 2, value_parser = at_least_one)]
    pub pipeline_parallel: usize,
    /// Micro-batches of a step.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = at_least_one)]
    pub micro_batches: usize,
    /// Schedules without split backwards.
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "NAME,..",
        default_value = "1f1b,eager-1f1b"
    )]
    pub pipeline_schedules: Vec<ScheduleKind>,
    /// Receives that are posted ahead.
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "N,..",
        default_value = "0,1"
    )]
    pub receives_ahead: Vec<usize>,
    /// Milliseconds that a forward of a rank sleeps; a backward sleeps twice as long.
    #[arg(long, value_name = "MS", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub forward_ms: u64,
    /// The time of a message, in forwards.
    #[arg(long, value_name = "FRACTION", default_value_t = 0.3, value_parser = above_zero)]
    pub transfer: f64,
    /// Measured steps of each case.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = at_least_one)]
    pub steps: usize,
    /// Write the results to this file as JSON.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// Flags of `context`.
#[derive(Args)]
pub struct ContextArgs {
    /// Tokens of the sequence.
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = at_least_one)]
    pub tokens: usize,
    /// Heads of the queries.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = at_least_one)]
    pub heads: usize,
    /// Groups of keys and values.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = at_least_one)]
    pub groups: usize,
    /// Features of a head.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = at_least_one)]
    pub width: usize,
    /// Numbers of ranks that share the sequence, compared with one.
    #[arg(
        long,
        visible_alias = "cp",
        value_delimiter = ',',
        value_name = "N,..",
        default_value = "2,4"
    )]
    pub ranks: Vec<usize>,
    /// Exchanges: ring, all-gather, all-to-all.
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "NAME,..",
        default_value = "ring,all-gather,all-to-all"
    )]
    pub exchanges: Vec<ContextExchange>,
    /// Train on documents of these lengths instead, in rows of --tokens that all ranks share, and on groups of ranks by their
    /// length (--hybrid-context-parallel of pretrain); without lengths on a long tail of 64 documents.
    #[arg(
        long,
        num_args = 0..,
        value_delimiter = ',',
        value_name = "N,..",
        conflicts_with_all = ["exchanges", "svg"]
    )]
    pub documents: Option<Vec<usize>>,
    /// Time of the transfers over the simulated link, as a fraction of the time of the layer without a link.
    #[arg(long, value_name = "FRACTION", default_value_t = 0.5, value_parser = above_zero)]
    pub share: f64,
    /// Measured steps.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = at_least_one)]
    pub steps: usize,
    /// Warm-up steps before them.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub warm_up: usize,
    /// Write a plot of one step over the link, of each exchange, to this file.
    #[arg(long, value_name = "FILE.svg")]
    pub svg: Option<PathBuf>,
    /// Write the results to this file as JSON.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// Flags of `dispatch`.
#[derive(Args)]
pub struct DispatchArgs {
    /// Tokens of a rank.
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = at_least_one)]
    pub tokens: usize,
    /// Features of a token.
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = at_least_one)]
    pub hidden: usize,
    /// Inner width of an expert.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = at_least_one)]
    pub expert_width: usize,
    /// Experts, which the ranks share evenly.
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = at_least_one)]
    pub experts: usize,
    /// Experts of a token.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = at_least_one)]
    pub experts_per_token: usize,
    /// Inner width of the shared expert.
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = at_least_one)]
    pub shared_width: usize,
    /// Ranks, each with one compute thread; at least 2.
    #[arg(long, visible_alias = "ep", value_name = "N", default_value_t = 4, value_parser = at_least_two)]
    pub ranks: usize,
    /// Ranks of a node.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = at_least_one)]
    pub ranks_per_node: usize,
    /// The scales of tokens in 8 bits: f32 or e8m0.
    #[arg(long, value_name = "f32|e8m0", default_value = "e8m0", value_parser = dispatch_scales)]
    pub fp8_dispatch: Fp8DispatchScales,
    /// Time of what the all-to-all dispatcher sends over the link between nodes, as a fraction of the time of the layer
    /// without a link.
    #[arg(long, value_name = "FRACTION", default_value_t = 0.5, value_parser = above_zero)]
    pub share: f64,
    /// The speed of the link inside of a node, relative to the link between nodes.
    #[arg(long, value_name = "TIMES", default_value_t = 8.0, value_parser = above_zero)]
    pub inside: f64,
    /// Measured steps.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = at_least_one)]
    pub steps: usize,
    /// Warm-up steps before them.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub warm_up: usize,
    /// Write the results to this file as JSON.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// The scales of a dispatch in 8 bits.
fn dispatch_scales(text: &str) -> Result<Fp8DispatchScales, ValueError> {
    let text: StrDeserializer<'_, ValueError> = text.into_deserializer();
    Fp8DispatchScales::deserialize(text)
}

/// Flags of `plan`.
#[derive(Args)]
pub struct PlanBenchArgs {
    /// The recipe whose model and batch are used; that of `pretrain` without flags by default. Its layout is not used.
    #[arg(long, visible_alias = "config", value_name = "FILE.toml")]
    pub recipe: Option<PathBuf>,
    /// Keys of the recipe.
    #[command(flatten)]
    pub set: SetArgs,
    /// Thread-ranks, each with one compute thread.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = at_least_one)]
    pub ranks: usize,
    /// Layouts, evenly spaced from the best to the worst by the plan.
    #[arg(long, value_name = "N", default_value_t = 12, value_parser = at_least_one)]
    pub layouts: usize,
    /// Rounds, each of which runs all layouts.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = at_least_one)]
    pub rounds: usize,
    /// Measured steps of each in a round; the median of all is reported.
    #[arg(long, value_name = "N", default_value_t = 9, value_parser = at_least_one)]
    pub steps: usize,
    /// Warm-up steps before them.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = at_least_one)]
    pub warm_up: usize,
    /// Write a scatter plot to this file.
    #[arg(long, value_name = "FILE.svg")]
    pub svg: Option<PathBuf>,
}

/// The type of the tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BenchDtype {
    /// 32 bits.
    #[value(aliases = ["fp32", "float32"])]
    F32,
    /// 16 bits, IEEE.
    #[value(aliases = ["fp16", "float16"])]
    F16,
    /// 16 bits, the range of f32.
    #[value(alias = "bfloat16")]
    Bf16,
}

impl BenchDtype {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }
}

/// `auto` or an engine of fused attention.
fn attention_engine(text: &str) -> Result<AttentionChoice, String> {
    match text.parse() {
        Ok(AttentionChoice::Form(KernelChoice::Unfused)) => {
            Err("expected auto, mma or portable; the column `composed` is unfused".into())
        }
        choice => choice.map_err(|error| format!("{error}")),
    }
}

/// A number of at least 2.
fn at_least_two(text: &str) -> Result<usize, String> {
    match at_least_one(text)? {
        1 => Err("expected at least 2".into()),
        number => Ok(number),
    }
}

/// A finite number above 0.
pub fn above_zero(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number > 0.0 && number.is_finite() => Ok(number),
        Ok(_) => Err("expected a finite number above 0".into()),
        Err(error) => Err(format!("{error}")),
    }
}
