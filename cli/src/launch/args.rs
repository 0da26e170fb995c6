//! The flags of `launch`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, ValueEnum};

/// Flags of `launch`.
#[derive(Args)]
pub struct LaunchArgs {
    /// Ranks to start, all on this machine; torchrun, srun and mpirun start those of several machines.
    #[arg(long, visible_alias = "nproc-per-node", value_name = "N")]
    pub ranks: usize,
    /// Communication engine of the ranks; mpi starts them through mpirun. The default is nccl where the
    /// command has --device cuda, else mpi.
    #[arg(long, value_enum)]
    pub engine: Option<LaunchEngine>,
    /// Start this program instead of burn-megatron; what follows -- are its arguments.
    #[arg(long, value_name = "PATH")]
    pub program: Option<PathBuf>,
    /// Port of the rendezvous, by default a free one (nccl).
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub master_port: Option<u16>,
    /// File of mode 0600 with the token that ranks authenticate with: 64 hexadecimal digits, as
    /// `openssl rand -hex 32` prints them. By default BURN_MEGATRON_TOKEN, or a new one.
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Path of Open MPI's mpirun; the one on PATH by default (mpi).
    #[arg(long, value_name = "PATH")]
    pub mpirun: Option<PathBuf>,
    /// Further arguments for mpirun, as in "--mca btl tcp,self" (mpi).
    #[arg(long, value_name = "ARGS", allow_hyphen_values = true)]
    pub mpirun_args: Option<String>,
    /// Also write the output of each rank, without prefixes, to files in this folder: rank-3.out and rank-3.err.
    /// Files of an earlier run are appended to.
    #[arg(long, value_name = "DIR")]
    pub output_dir: Option<PathBuf>,
    /// Show the standard output of rank 0 only; standard error is shown for all.
    #[arg(long)]
    pub quiet_ranks: bool,
    /// Seconds after Ctrl-C or SIGTERM within which the ranks may stop by themselves.
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0, value_parser = seconds)]
    pub grace: f64,
    /// Start the job again at most N times from its newest whole checkpoint, after a signal, a lost rank or another fault
    /// that may pass, such as those that `pretrain --train.check_replay_every` ends with by code 5 or 6: `pretrain` with --run-dir, or
    /// --program, which resumes by itself.
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Restart")]
    pub max_restarts: usize,
    /// Seconds before the first restart [default: 1]. The time is doubled, up to 60 s, with each restart that follows without
    /// a new checkpoint.
    #[arg(long, value_name = "SECONDS", value_parser = seconds, help_heading = "Restart")]
    pub restart_delay: Option<f64>,
    /// The command of burn-megatron that each rank runs, such as `pretrain --steps 20`; -- before it is optional.
    #[arg(
        trailing_var_arg = true,
        value_name = "COMMAND",
        required_unless_present = "program"
    )]
    pub command: Vec<OsString>,
}

/// The most ranks.
pub const MAX_RANKS: usize = 1024;

/// The communication engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LaunchEngine {
    /// Ranks are threads of one process; refused, as it needs no launcher.
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
