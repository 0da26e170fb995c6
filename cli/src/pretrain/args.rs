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

/// Flags of `pretrain`. Those of settings are made of the settings; `help.rs` adds the values of the recipe to their help.
#[derive(Args)]
pub struct PretrainArgs {
    /// The recipe, a TOML file. What it leaves out is that of the run that is resumed, or else of the recipe that is
    /// compiled in (in `burn-megatron`: cli/src/tiny.toml).
    #[arg(long, visible_alias = "config", value_name = "FILE.toml")]
    pub recipe: Option<PathBuf>,
    /// Keys of the recipe.
    #[command(flatten)]
    pub set: SetArgs,
    /// Training data: a file of text, JSON lines, Parquet or Arrow, of .gz or .zst too; a folder of them, or of a
    /// Hugging Face dataset; the PREFIX of PREFIX.bin and PREFIX.idx; or conversations to fine-tune on, a .jsonl
    /// file. The default is the text of this repository.
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
    /// Measure the quantisation errors of 8-bit layers in the last step: print a table, and write fp8.json to the run
    /// folder.
    #[arg(long, help_heading = "Precision")]
    pub fp8_report: bool,
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
    /// start, and `gemm_algorithms=FILE` for algorithms of cuBLASLt that burn-megatron-bench gemm --tune has chosen.
    #[arg(
        long,
        value_name = "CHOICE|OPERATION=CHOICE,..",
        help_heading = "Device and kernels"
    )]
    pub kernels: Vec<String>,
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
    /// Print the details of the header: the mesh with its process groups, the gradient buckets, the reason for each kernel,
    /// and the memory by kind. Without this flag they are in header.txt in the run folder.
    #[arg(long, short, help_heading = "Run")]
    pub verbose: bool,
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
    /// Go on with the run in the run folder, with this resolved recipe in place of the flags of settings: `launch
    /// --max-restarts` gives both in addition to the flags of the first attempt.
    #[arg(long, value_names = ["FILE.toml", "RUN_DIR"], num_args = 2, hide = true)]
    pub restart: Option<Vec<PathBuf>>,
}

impl PretrainArgs {
    /// Replaces what only the first attempt of a run does, if this is a later one.
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
