//! The flags of `pretrain`.

use std::path::PathBuf;

use burn_megatron::device::DeviceKind;
use burn_megatron_comm_testing::fault_injection::Fault;
use clap::Args;

use crate::byte_size::ByteSize;
use crate::ranks::RankArgs;
use crate::resume_mode::AUTO;
use crate::saving::SavingArgs;
use crate::set::SetArgs;
use crate::settings::SettingFlags;

/// Flags of `pretrain`. The flags of recipe settings are generated from the settings, and `help.rs` adds the values
/// of the recipe to their help.
#[derive(Args)]
pub struct PretrainArgs {
    /// The recipe, a TOML file. Missing settings are taken from the run that is resumed, or else from the compiled-in
    /// recipe (for `burn-megatron`: cli/src/tiny.toml).
    #[arg(long, visible_alias = "config", value_name = "FILE.toml")]
    pub recipe: Option<PathBuf>,
    /// Keys of the recipe.
    #[command(flatten)]
    pub set: SetArgs,
    /// Training data: a file of text, JSON lines, Parquet or Arrow (also .gz or .zst), a folder of such files, a
    /// Hugging Face dataset folder, or the PREFIX of PREFIX.bin and PREFIX.idx. A .jsonl file of conversations
    /// selects fine-tuning. The default is the text of this repository.
    #[arg(
        long,
        value_name = "PATH|PREFIX",
        conflicts_with_all = ["data.path", "data.files", "data.chat.files"],
        help_heading = "Data"
    )]
    pub data: Option<PathBuf>,
    /// A flag for each key of the recipe.
    #[command(flatten)]
    pub settings: SettingFlags,
    /// Micro-batches per step and data-parallel rank; sets --micro-batch-size.
    #[arg(
        long,
        value_name = "M",
        conflicts_with = "train.micro_batch_size",
        help_heading = "Training"
    )]
    pub micro_batches: Option<usize>,
    /// Measure the quantization errors of FP8 layers in the last step: print a table, and write fp8.json to the run
    /// folder.
    #[arg(long, help_heading = "Precision")]
    pub fp8_report: bool,
    /// Flags of checkpoints and resuming.
    #[command(flatten)]
    pub saving: SavingArgs,
    /// Device: cpu, wgpu or cuda. wgpu and cuda must be compiled in (--features wgpu, --features cuda).
    #[arg(long, default_value_t = DeviceKind::Cpu, help_heading = "Device and kernels")]
    pub device: DeviceKind,
    /// Fail if a CUDA device has to use slow engines: Burn's matmul instead of cuBLASLt, or attention without matrix
    /// units. Without this flag, the header contains a warning.
    #[arg(long, help_heading = "Device and kernels")]
    pub require_fast_kernels: bool,
    /// Operations that use fused kernels: auto, fused or unfused, for all operations or for one, as in
    /// `unfused,norm=fused`. The operations are norm, activation, dropout, rope, attention, softmax, loss, linear and
    /// optimizer. Attention also accepts an engine: mma (NVIDIA matrix units, f16 and bf16) or portable. `gemm=`
    /// selects an installed library for matrix products on the CPU: mkl, openblas or blis. On CUDA,
    /// `epilogue_fusion=true` fuses GELU as an epilogue of matrix products, and `measured` selects the faster form at
    /// the first start. `gemm_algorithms=FILE` uses the cuBLASLt algorithms that burn-megatron-bench gemm --tune has
    /// chosen.
    #[arg(
        long,
        value_name = "CHOICE|OPERATION=CHOICE,..",
        help_heading = "Device and kernels"
    )]
    pub kernels: Vec<String>,
    /// Compute threads per rank on the CPU. By default the cores are divided evenly among the ranks.
    #[arg(long, value_name = "N", help_heading = "Device and kernels")]
    pub compute_threads: Option<usize>,
    /// The ranks and their timeouts.
    #[command(flatten)]
    pub ranks: RankArgs,
    /// Seconds that the current step has to finish after Ctrl-C or SIGTERM. Saving then has the same time again. If
    /// twice the longest step is more, that time applies instead. When the time is over, the process exits with code
    /// 130.
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 30.0,
        help_heading = "Run"
    )]
    pub grace: f64,
    /// Folder in which the run folder is created. The default is runs.
    #[arg(
        long,
        value_name = "PATH",
        conflicts_with = "run_dir",
        help_heading = "Run"
    )]
    pub runs_dir: Option<PathBuf>,
    /// Run folder. It must not exist, unless the run is resumed (--resume).
    #[arg(long, value_name = "PATH", help_heading = "Run")]
    pub run_dir: Option<PathBuf>,
    /// Start even if the planned memory exceeds the memory of this machine, its cgroup or its devices.
    #[arg(long, help_heading = "Memory")]
    pub ignore_memory: bool,
    /// Maximum memory of a rank, as in 80GiB. A run whose plan exceeds it is refused before anything is allocated,
    /// with the settings that would fit. By default, the limit is the available memory. With --device cpu, all ranks
    /// on this machine must fit into the memory of the machine and its cgroup. With --device cuda, the ranks on a
    /// device must fit into its memory.
    #[arg(long, value_name = "BYTES", help_heading = "Memory")]
    pub memory_limit: Option<ByteSize>,
    /// Print the details of the header: the mesh with its process groups, the gradient buckets, the reason for each
    /// kernel, and the memory by kind. Without this flag they are only in header.txt in the run folder.
    #[arg(long, short, help_heading = "Run")]
    pub verbose: bool,
    /// Print the recipe with the source of each value, and exit.
    #[arg(long, help_heading = None::<&str>)]
    pub print_recipe: bool,
    /// Check the recipe, the layout, the data and the memory, print the header of the run with the memory by kind,
    /// and exit. Nothing is allocated or written.
    #[arg(long, conflicts_with = "print_recipe", help_heading = None::<&str>)]
    pub dry_run: bool,
    /// Inject a fault into a collective of one rank. KIND@rank=N,call=N counts calls from 0 since the start.
    /// KIND@rank=N,step=N,call=N counts steps from 1, and calls from 0 since the beginning of the step. KIND is
    /// delay:TIME (as in delay:2.5s), drop, shape, wrong-call, nan, panic, error, kill, abort, segfault, stop,
    /// terminate, interrupt or spin. With never-starts@rank=N the rank never starts. bit-flip:TARGET or
    /// bit-flip:TARGET:ELEMENT:BIT flips a bit of an activation, gradient, weight, optimizer state (optimizer) or
    /// result of a collective; call=N then counts the tensors of this kind. May be repeated.
    #[arg(
        long,
        value_name = "FAULT",
        hide_short_help = true,
        help_heading = "Testing"
    )]
    pub inject: Vec<Fault>,
    /// Continue the run in the run folder with this resolved recipe, which replaces the flags of settings. `launch
    /// --max-restarts` adds both values to the flags of the first attempt.
    #[arg(long, value_names = ["FILE.toml", "RUN_DIR"], num_args = 2, hide = true)]
    pub restart: Option<Vec<PathBuf>>,
}

impl PretrainArgs {
    /// Replaces the arguments that only apply to the first attempt of a run, if `--restart` is given.
    pub fn follow_restart(&mut self) {
        let parts = self.restart.take().and_then(|parts| parts.try_into().ok());
        let Some::<[PathBuf; 2]>([recipe, folder]) = parts else {
            return;
        };
        self.recipe = Some(recipe);
        self.set = SetArgs::default();
        self.settings = SettingFlags::default();
        (self.data, self.micro_batches, self.runs_dir) = (None, None, None);
        self.kernels.clear();
        self.inject.clear();
        self.run_dir = Some(folder);
        self.saving.resume = Some(AUTO.into());
        (self.saving.no_save, self.saving.discard_later) = (false, false);
    }
}
