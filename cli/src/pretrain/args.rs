//! The flags of `pretrain`.

use std::path::PathBuf;
use std::str::FromStr;

use burn_megatron::comm::testing::fault_injection::Fault;
use burn_megatron::device::DeviceKind;
use clap::Args;

use crate::byte_size::ByteSize;
use crate::data::settings::DataArgs;
use crate::data_parallel::DataParallelArgs;
use crate::determinism::DeterminismArgs;
use crate::fp8::Fp8Args;
use crate::memory::MemoryArgs;
use crate::qk_clip::QkClipArgs;
use crate::ranks::RankArgs;
use crate::saving::SavingArgs;
use crate::set::SetArgs;

/// The size of the data axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataRanks {
    /// This size.
    Number(usize),
    /// The number of started ranks, divided by the ranks of one replica.
    Auto,
}

impl FromStr for DataRanks {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            text => text
                .parse()
                .map(Self::Number)
                .map_err(|_| "expected a number, or auto".into()),
        }
    }
}

/// Flags of `pretrain`; each overrides a setting of the recipe. `help.rs` adds the defaults of the recipe to their help.
#[derive(Args)]
pub struct PretrainArgs {
    /// The recipe, a TOML file. What it leaves out is that of the run that is resumed, or else of the recipe that is
    /// compiled in (in `burn-megatron`: cli/src/tiny.toml).
    #[arg(long, visible_alias = "config", value_name = "FILE.toml")]
    pub recipe: Option<PathBuf>,
    /// Keys of the recipe.
    #[command(flatten)]
    pub set: SetArgs,
    /// The training data.
    #[command(flatten)]
    pub data: DataArgs,
    /// Ranks that share each layer.
    #[arg(
        long,
        visible_alias = "tp",
        value_name = "N",
        help_heading = "Parallelism"
    )]
    pub tensor_parallel: Option<usize>,
    /// Ranks that share the batch; auto: as many as a launcher started ranks for, beside the other axes.
    #[arg(
        long,
        visible_alias = "dp",
        value_name = "N|auto",
        help_heading = "Parallelism"
    )]
    pub data_parallel: Option<DataRanks>,
    /// Split the activations between the blocks along the sequence, over the ranks of
    /// --tensor-parallel.
    #[arg(long, visible_alias = "sp", value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", help_heading = "Parallelism")]
    pub sequence_parallel: Option<bool>,
    /// Split the exchanges of --sequence-parallel into chunks that travel while the products of others are computed: ring
    /// (from neighbour to neighbour), bulk (several collectives), or none.
    #[arg(long, value_name = "NAME", help_heading = "Parallelism")]
    pub tp_comm_overlap: Option<String>,
    /// The number of chunks of --tp-comm-overlap into which the tokens of each rank are split; by default chosen by the
    /// sizes.
    #[arg(long, value_name = "N", help_heading = "Parallelism")]
    pub tp_comm_overlap_num_splits: Option<usize>,
    /// Ranks that share each sequence.
    #[arg(
        long,
        visible_alias = "cp",
        value_name = "N",
        help_heading = "Parallelism"
    )]
    pub context_parallel: Option<usize>,
    /// Method by which the ranks of --context-parallel compute attention to each other's keys and values: ring,
    /// all-gather, all-to-all, or hierarchical (with parallel.context_inner in the recipe); by default chosen by the
    /// sizes.
    #[arg(long, value_name = "NAME", help_heading = "Parallelism")]
    pub context_exchange: Option<String>,
    /// Share each document by its length: short ones are on one rank, longer ones on groups of 2, 4, ... of the ranks of
    /// --context-parallel and --data-parallel, so that all compute about as much (needs --max-seqlen-per-dp-cp-rank).
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", help_heading = "Parallelism")]
    pub hybrid_context_parallel: Option<bool>,
    /// The most tokens of a rank in a micro-batch of --hybrid-context-parallel.
    #[arg(long, value_name = "N", help_heading = "Parallelism")]
    pub max_seqlen_per_dp_cp_rank: Option<usize>,
    /// Ranks that share the experts; they read different samples, so --data-parallel counts them too.
    #[arg(
        long,
        visible_alias = "ep",
        value_name = "N",
        help_heading = "Parallelism"
    )]
    pub expert_parallel: Option<usize>,
    /// Ranks that share each expert; by default as many as share each layer.
    #[arg(
        long,
        visible_alias = "etp",
        value_name = "N",
        help_heading = "Parallelism"
    )]
    pub expert_tensor_parallel: Option<usize>,
    /// Run the forward of each micro-batch beside the backward of another, so that one computes while tokens of the other
    /// travel to their experts and back (two micro-batches are in memory; needs --expert-parallel).
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", help_heading = "Parallelism")]
    pub overlap_moe_expert_parallel_comm: Option<bool>,
    /// Ranks of a node, with consecutive numbers: exchanges that know nodes send less between them.
    #[arg(long, value_name = "N", help_heading = "Parallelism")]
    pub ranks_per_node: Option<usize>,
    /// Ranks that share the layers, each with its stages.
    #[arg(
        long,
        visible_alias = "pp",
        value_name = "N",
        help_heading = "Parallelism"
    )]
    pub pipeline_parallel: Option<usize>,
    /// Stages per pipeline rank.
    #[arg(long, value_name = "V", help_heading = "Parallelism")]
    pub virtual_stages: Option<usize>,
    /// Pipeline schedule: gpipe, 1f1b, eager-1f1b (1F1B with twice the warm-up, which hides transfers), interleaved,
    /// interleaved:N (in groups of N micro-batches), zb-h1, zb-v, dualpipe-v, or a CSV file.
    #[arg(long, value_name = "NAME|FILE.csv", help_heading = "Parallelism")]
    pub pipeline_schedule: Option<String>,
    /// Let the last stage defer the weight gradients of the output layer to its cool-down, at most LIMIT of
    /// them (0, or no number: all).
    #[arg(long, value_name = "LIMIT", num_args = 0..=1, default_missing_value = "0", help_heading = "Parallelism")]
    pub defer_embedding_wgrad: Option<usize>,
    /// Receives from each neighbour in the pipeline that are posted ahead of their position in the schedule, each with the
    /// memory of one activation.
    #[arg(long, value_name = "N", help_heading = "Parallelism")]
    pub receives_ahead: Option<usize>,
    /// Send activations and their gradients between pipeline ranks in FP8; they are rounded to 4 significant bits.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", help_heading = "Parallelism")]
    pub fp8_transfers: Option<bool>,
    /// Micro-batches per step and data-parallel rank; sets --micro-batch-size.
    #[arg(
        long,
        value_name = "M",
        conflicts_with = "micro_batch_size",
        help_heading = "Training"
    )]
    pub micro_batches: Option<usize>,
    /// Samples per micro-batch.
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub micro_batch_size: Option<usize>,
    /// Samples per step, over all ranks and micro-batches.
    #[arg(
        long,
        value_name = "N",
        visible_alias = "batch-size",
        help_heading = "Training"
    )]
    pub global_batch_size: Option<usize>,
    /// Optimizer steps.
    #[arg(long, value_name = "N", visible_aliases = ["max-steps", "train-iters"], help_heading = "Training")]
    pub steps: Option<usize>,
    /// Peak learning rate; the final one is scaled with it.
    #[arg(long, value_name = "RATE", help_heading = "Training")]
    pub lr: Option<f64>,
    /// The gradient norm to which larger gradients are scaled down.
    #[arg(long, value_name = "NORM", help_heading = "Training")]
    pub clip: Option<f64>,
    /// Seed of weights, dropout, sampling and generated text.
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub seed: Option<u64>,
    /// The prompt of the text that is generated at the end; by default the beginning of the held-out data, or "pub fn "
    /// for the text of this repository.
    #[arg(long, value_name = "TEXT", help_heading = "Training")]
    pub prompt: Option<String>,
    /// The limit of attention logits.
    #[command(flatten)]
    pub qk_clip: QkClipArgs,
    /// Determinism and its checks.
    #[command(flatten)]
    pub determinism: DeterminismArgs,
    /// Data parallelism.
    #[command(flatten)]
    pub sharing: DataParallelArgs,
    /// 8-bit layers.
    #[command(flatten)]
    pub fp8: Fp8Args,
    /// Recomputation.
    #[command(flatten)]
    pub memory: MemoryArgs,
    /// Checkpoints and resuming.
    #[command(flatten)]
    pub saving: SavingArgs,
    /// Device: cpu, wgpu or cuda. The last two must be compiled in (--features wgpu, --features cuda).
    #[arg(long, default_value_t = DeviceKind::Cpu, help_heading = "Device and kernels")]
    pub device: DeviceKind,
    /// Refuse to train where a CUDA device has to use slow engines: Burn's matmul without cuBLASLt, or attention without
    /// matrix units. Without this flag, the header has a warning.
    #[arg(long, help_heading = "Device and kernels")]
    pub require_fast_kernels: bool,
    /// Which operations use fused kernels: auto, fused or unfused, for all or for one, as in
    /// `unfused,norm=fused`. The operations: norm, activation, dropout, rope, attention, softmax,
    /// loss, linear, optimizer. For attention also an engine: mma (matrix units of NVIDIA, f16
    /// and bf16) or portable. For matrix products on the CPU `gemm=` and an installed library: mkl, openblas, blis. On CUDA
    /// `epilogue_fusion=true` for GELU as an epilogue of products, or `measured` for the form that is faster at the first
    /// start, and `gemm_algorithms=FILE` for algorithms of cuBLASLt that bench gemm --tune has chosen.
    #[arg(
        long,
        value_name = "CHOICE|OPERATION=CHOICE,..",
        help_heading = "Device and kernels"
    )]
    pub kernels: Vec<String>,
    /// Capture the launches of a micro-batch once as a CUDA graph, and replay it from then on: one call of the host instead of
    /// one per kernel, with the same bits. For data parallelism with ZeRO-0 to 2, over NCCL, and dense models without dropout
    /// and FP8.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", help_heading = "Device and kernels")]
    pub cuda_graph: Option<bool>,
    /// Tokens whose logits are in memory at once (fused loss only); 0: all of a micro-batch. By default the logits of
    /// a chunk take at most 1 GiB.
    #[arg(long, value_name = "N", help_heading = "Device and kernels")]
    pub loss_chunk_size: Option<usize>,
    /// Compute threads per rank on the CPU; by default the cores are divided evenly.
    #[arg(long, value_name = "N", help_heading = "Device and kernels")]
    pub compute_threads: Option<usize>,
    /// The ranks and their timeouts.
    #[command(flatten)]
    pub ranks: RankArgs,
    /// Seconds after Ctrl-C or SIGTERM for the current step to finish, and as many again to save; twice the
    /// longest step if that is more. Then the process exits with 130.
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 30.0,
        help_heading = "Run"
    )]
    pub grace: f64,
    /// Folder in which the run folder is created; runs by default.
    #[arg(
        long,
        value_name = "PATH",
        conflicts_with = "run_dir",
        help_heading = "Run"
    )]
    pub runs_dir: Option<PathBuf>,
    /// Run folder; must not exist yet, unless the run is resumed (--resume).
    #[arg(long, value_name = "PATH", help_heading = "Run")]
    pub run_dir: Option<PathBuf>,
    /// Start even where the planned memory is more than that of this machine, of its cgroup or of its devices.
    #[arg(long, help_heading = "Memory")]
    pub ignore_memory: bool,
    /// The most memory that a rank may need, as in 80GiB: a run whose plan has more is refused before anything is
    /// allocated, with the settings that would fit. By default the plan of all ranks of this machine is compared with
    /// its memory and its cgroup (--device cpu), or that of the ranks of a device with its memory (--device cuda).
    #[arg(long, value_name = "BYTES", help_heading = "Memory")]
    pub memory_limit: Option<ByteSize>,
    /// Print the recipe with where each value is from, and exit.
    #[arg(long, help_heading = None::<&str>)]
    pub print_recipe: bool,
    /// Check the recipe, the layout, the data and the memory, print the header of the run with the memory by kind, and
    /// exit: nothing is allocated or written.
    #[arg(long, conflicts_with = "print_recipe", help_heading = None::<&str>)]
    pub dry_run: bool,
    /// Inject a fault into a collective of one rank: KIND@rank=N,call=N, with calls counted from 0 since the
    /// start, or KIND@rank=N,step=N,call=N, with steps from 1 and calls since the beginning of the step. KIND is
    /// delay:TIME (as in delay:2.5s), drop, shape, wrong-call, nan, panic, error, kill, abort, segfault, stop,
    /// terminate, interrupt or spin; never-starts@rank=N is a rank that never starts. bit-flip:TARGET or
    /// bit-flip:TARGET:ELEMENT:BIT flips a bit of an activation, gradient, weight, optimizer state (optimizer) or result of
    /// a collective, of which call=N is the number. May be repeated.
    #[arg(
        long,
        value_name = "FAULT",
        hide_short_help = true,
        help_heading = "Testing"
    )]
    pub inject: Vec<Fault>,
}
