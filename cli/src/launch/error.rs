//! Errors that prevent the launcher from starting the ranks.

use std::io;
use std::path::PathBuf;

use burn_megatron::comm::TokenError;

use super::args::MAX_RANKS;
use crate::error::Error;

/// The exit code for wrong usage, as in clap.
const USAGE: u8 = 2;
/// The exit code if a program cannot be started, as in a shell.
pub const NOT_STARTED: u8 = 127;

/// Reason why nothing was started.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    #[error("invalid --ranks 0: expected at least 1")]
    NoRanks,
    #[error("invalid --ranks {0}: expected at most {MAX_RANKS} on one machine")]
    TooManyRanks(usize),
    #[error(
        "--engine threads conflicts with `launch`, because its ranks are threads of one process; remove `launch \
         --ranks N --` and set the sizes, as in `burn-megatron pretrain --tp 2`"
    )]
    Threads,
    #[error(
        "{variable}={value} is set: this process is already a rank, and a rank cannot start ranks; run `launch` in \
         another process, or unset {variable}"
    )]
    Nested {
        variable: &'static str,
        value: String,
    },
    #[error("{flag} requires --engine {engine}, but this run has --engine {chosen}: remove it")]
    WrongEngine {
        flag: &'static str,
        engine: &'static str,
        chosen: &'static str,
    },
    #[error(
        "the master port {port} is not free on this machine: {source}; choose another with --master-port"
    )]
    PortTaken { port: u16, source: io::Error },
    #[error(
        "the engine {engine} is not compiled in: install this program with it, `cargo install --path cli --features \
         {feature}`, or build it, `cargo build --release --features {feature}`"
    )]
    NotCompiled {
        engine: &'static str,
        feature: &'static str,
    },
    #[error(transparent)]
    Token(#[from] TokenError),
    #[error("--mpirun-args {0:?}: a quote is not closed")]
    Quote(String),
    #[error(
        "mpirun was not found on PATH; install it (Debian, Ubuntu: apt-get install openmpi-bin; Fedora: \
         dnf install openmpi), or name it with --mpirun PATH"
    )]
    NoMpirun,
    #[error("{} is not Open MPI's mpirun: {said}; name one with --mpirun PATH", path.display())]
    OtherMpirun { path: PathBuf, said: String },
    #[error("the program {} cannot be started: {reason}", program.display())]
    Program { program: PathBuf, reason: String },
    #[error("the output folder {} cannot be used: {source}", path.display())]
    OutputFolder { path: PathBuf, source: io::Error },
    #[error(
        "--restart-delay requires --max-restarts; add --max-restarts N, or remove --restart-delay"
    )]
    DelayWithoutRestarts,
    #[error("{0}")]
    NoRestart(String),
    #[error("{0}")]
    Job(Error),
    #[error("{what}: {source}")]
    System {
        what: &'static str,
        source: io::Error,
    },
}

/// Converts an error that `pretrain` itself would return.
impl From<Error> for LaunchError {
    fn from(error: Error) -> Self {
        Self::Job(error)
    }
}

impl LaunchError {
    /// Returns the exit code of the launcher.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Program { .. } | Self::NoMpirun | Self::OtherMpirun { .. } => NOT_STARTED,
            Self::OutputFolder { .. } | Self::System { .. } | Self::Job(_) => 1,
            _ => USAGE,
        }
    }

    /// Returns a function that converts the error of a failed system call. `what` describes the purpose of the call.
    pub fn system(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::System { what, source }
    }
}
