//! The flags of `launch`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, ValueEnum};

/// Flags of `launch`.
#[derive(Args)]
pub struct LaunchArgs {
    /// Number of ranks to start on this machine. To start ranks on several machines, use torchrun, srun or mpirun.
    #[arg(long, visible_alias = "nproc-per-node", value_name = "N")]
    pub ranks: usize,
    /// Communication engine of the ranks. With mpi, mpirun starts the ranks. The default is nccl if the command
    /// contains --device cuda, and mpi otherwise.
    #[arg(long, value_enum)]
    pub engine: Option<LaunchEngine>,
    /// Start this program instead of burn-megatron. The arguments after -- are passed to the program.
    #[arg(long, value_name = "PATH")]
    pub program: Option<PathBuf>,
    /// Port at which the ranks connect to each other (nccl only). The default is a free port.
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub master_port: Option<u16>,
    /// File that contains the token with which the ranks authenticate: 64 hexadecimal digits, as `openssl rand -hex 32`
    /// prints them. The file must have mode 0600. The default is the environment variable BURN_MEGATRON_TOKEN, or a new
    /// token.
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Path of the mpirun program of Open MPI (mpi only). The default is the mpirun on PATH.
    #[arg(long, value_name = "PATH")]
    pub mpirun: Option<PathBuf>,
    /// Additional arguments for mpirun, as in "--mca btl tcp,self" (mpi only).
    #[arg(long, value_name = "ARGS", allow_hyphen_values = true)]
    pub mpirun_args: Option<String>,
    /// Also write the output of each rank to files in this folder, without prefixes. For rank 3, the files are
    /// rank-3.out and rank-3.err. Output is appended to existing files.
    #[arg(long, value_name = "DIR")]
    pub output_dir: Option<PathBuf>,
    /// Show the standard output of rank 0 only. Standard error is shown for all ranks.
    #[arg(long)]
    pub quiet_ranks: bool,
    /// Time in seconds that the ranks have to stop after Ctrl-C or SIGTERM. After this time, they are killed.
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0, value_parser = seconds)]
    pub grace: f64,
    /// Restart the job up to N times from its latest complete checkpoint after a transient failure. Transient failures
    /// are a signal, a lost rank, a panic, and the exit codes 5 and 6 of `pretrain --train.check_replay_every`. This
    /// flag requires `pretrain` with --run-dir, or a --program that resumes automatically.
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Restart")]
    pub max_restarts: usize,
    /// Delay before the first restart, in seconds [default: 1]. If there is no new checkpoint since the last restart,
    /// the delay is doubled, up to 60 s.
    #[arg(long, value_name = "SECONDS", value_parser = seconds, help_heading = "Restart")]
    pub restart_delay: Option<f64>,
    /// The command of burn-megatron that each rank runs, such as `pretrain --steps 20`. A -- before the command is
    /// optional.
    #[arg(
        trailing_var_arg = true,
        value_name = "COMMAND",
        required_unless_present = "program"
    )]
    pub command: Vec<OsString>,
}

/// Maximum number of ranks.
pub const MAX_RANKS: usize = 1024;

/// Communication engines of `launch`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LaunchEngine {
    /// Threads of one process. `launch` does not support this engine, because it needs no launcher.
    Threads,
    /// NCCL, on CUDA devices.
    Nccl,
    /// MPI.
    Mpi,
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if (0.0..=1e6).contains(&number) => Ok(number),
        Ok(number) => Err(format!(
            "{number} is out of range: expected 0 to 1000000 seconds"
        )),
        Err(error) => Err(format!("{error}")),
    }
}
