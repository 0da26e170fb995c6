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
    /// The recipe, which is a TOML file. Settings that it does not contain are taken from the run that is resumed, or
    /// otherwise from the built-in recipe (cli/src/tiny.toml for `burn-megatron`).
    #[arg(long, visible_alias = "config", value_name = "FILE.toml")]
    pub recipe: Option<PathBuf>,
    /// Flags that set keys of the recipe.
    #[command(flatten)]
    pub set: SetArgs,
    /// Training data: a file, a folder of files, a Hugging Face dataset folder, or the PREFIX of the token files
    /// PREFIX.bin and PREFIX.idx. Files can be text, JSON Lines, Parquet or Arrow, optionally compressed as .gz or
    /// .zst. If the value is a .jsonl file of conversations, the model is fine-tuned on them. The default is the text
    /// of this repository.
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
    /// Number of micro-batches per step on each data-parallel rank. The value of --micro-batch-size is computed from
    /// it.
    #[arg(
        long,
        value_name = "M",
        conflicts_with = "train.micro_batch_size",
        help_heading = "Training"
    )]
    pub micro_batches: Option<usize>,
    /// Measure the quantization errors of the FP8 layers in the last step. They are printed as a table, and written to
    /// fp8.json in the run folder.
    #[arg(long, help_heading = "Precision")]
    pub fp8_report: bool,
    /// Flags of checkpoints and resuming.
    #[command(flatten)]
    pub saving: SavingArgs,
    /// Device: cpu, wgpu or cuda. wgpu and cuda must be compiled in (--features wgpu, --features cuda).
    #[arg(long, default_value_t = DeviceKind::Cpu, help_heading = "Device and kernels")]
    pub device: DeviceKind,
    /// Fail if only a slow implementation is available on a CUDA device: Burn's matmul instead of cuBLASLt, or
    /// attention without tensor cores. Without this flag, a warning is printed in the header.
    #[arg(long, help_heading = "Device and kernels")]
    pub require_fast_kernels: bool,
    /// Operations that use fused kernels. The value is auto, fused or unfused for all operations, optionally followed
    /// by values for single operations, as in `unfused,norm=fused`. The operations are norm, activation, dropout, rope,
    /// attention, softmax, loss, linear and optimizer. For attention, the value can also be an engine: mma (NVIDIA
    /// tensor cores, f16 and bf16) or portable. `gemm=` selects an installed library for matrix multiplications on the
    /// CPU: mkl, openblas or blis. On CUDA, `epilogue_fusion=true` computes GELU in the epilogue of matrix
    /// multiplications, and `epilogue_fusion=measured` selects the faster variant at the first start.
    /// `gemm_algorithms=FILE` uses the cuBLASLt algorithms that `burn-megatron-bench gemm --tune` has selected.
    #[arg(
        long,
        value_name = "CHOICE|OPERATION=CHOICE,..",
        help_heading = "Device and kernels"
    )]
    pub kernels: Vec<String>,
    /// Number of compute threads per rank on the CPU. By default, the cores are divided evenly among the ranks.
    #[arg(long, value_name = "N", help_heading = "Device and kernels")]
    pub compute_threads: Option<usize>,
    /// Flags for the ranks and their timeouts.
    #[command(flatten)]
    pub ranks: RankArgs,
    /// Maximum time in seconds for the current step to finish after Ctrl-C or SIGTERM. Saving the checkpoint may take
    /// the same time again. If twice the duration of the longest step is longer, it is used as the maximum time
    /// instead. When the time is over, the process exits with code 130.
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 30.0,
        help_heading = "Run"
    )]
    pub grace: f64,
    /// Folder in which the run folder is created. The default is `runs`.
    #[arg(
        long,
        value_name = "PATH",
        conflicts_with = "run_dir",
        help_heading = "Run"
    )]
    pub runs_dir: Option<PathBuf>,
    /// Run folder, to which all files of the run are written. It must not exist, unless the run is resumed (--resume).
    #[arg(long, value_name = "PATH", help_heading = "Run")]
    pub run_dir: Option<PathBuf>,
    /// Start the run even if it is planned to need more memory than this machine, its cgroup or its devices have.
    #[arg(long, help_heading = "Memory")]
    pub ignore_memory: bool,
    /// Maximum memory of a rank, as in 80GiB. If a run is planned to need more, it fails before anything is allocated,
    /// and the error lists settings with less memory. By default, the limit is the available memory. With --device cpu,
    /// all ranks on this machine must fit into the memory of the machine and its cgroup. With --device cuda, all ranks
    /// on a device must fit into the memory of the device.
    #[arg(long, value_name = "BYTES", help_heading = "Memory")]
    pub memory_limit: Option<ByteSize>,
    /// Print a detailed header: the mesh with its process groups, the gradient buckets, the reason why each kernel was
    /// selected, and the memory by kind. Without this flag, the details are only in header.txt in the run folder.
    #[arg(long, short, help_heading = "Run")]
    pub verbose: bool,
    /// Print the recipe with the source of each value (a file, a flag or a default), and exit.
    #[arg(long, help_heading = None::<&str>)]
    pub print_recipe: bool,
    /// Check the recipe, the layout, the data and the memory, print the header of the run with the planned memory by
    /// kind, and exit. No model is allocated, and no file is written.
    #[arg(long, conflicts_with = "print_recipe", help_heading = None::<&str>)]
    pub dry_run: bool,
    /// Inject a fault into a collective call of one rank, to test error handling. The value has the form
    /// KIND@rank=N,call=N, where calls are counted from 0 since the start of the run. With KIND@rank=N,step=N,call=N,
    /// calls are counted from 0 since the start of the step, and steps are counted from 1. KIND is delay:TIME (as in
    /// delay:2.5s), drop, shape, wrong-call, nan, panic, error, kill, abort, segfault, stop, terminate, interrupt or
    /// spin. With never-starts@rank=N, the rank does not start. bit-flip:TARGET or bit-flip:TARGET:ELEMENT:BIT flips a
    /// bit of a tensor. TARGET is activation, gradient, weight, optimizer or collective (the result of a collective),
    /// and call=N counts the tensors of this kind. May be repeated.
    #[arg(
        long,
        value_name = "FAULT",
        hide_short_help = true,
        help_heading = "Testing"
    )]
    pub inject: Vec<Fault>,
    /// Continue the run in this run folder with this complete recipe, which replaces all flags for settings. `launch
    /// --max-restarts` adds this flag with both values when it restarts a run.
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
