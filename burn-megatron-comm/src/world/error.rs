//! The error of a world of ranks.

use std::error::Error;
use std::io::{self, Write};
use std::path::PathBuf;

use super::Engine;
use crate::error::CommError;
use crate::nccl_config::NcclConfigError;
use burn_megatron_rendezvous::{FailureReport, LaunchEnvError, Launcher, RendezvousError};

/// The reason why a world of ranks could not be started or has failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WorldError {
    /// The number of ranks is 0.
    #[error("invalid number of ranks 0: expected at least 1")]
    NoRanks,
    /// The requested number of ranks exceeds the maximum number of ranks in a world of threads.
    #[error("invalid number of ranks {asked}: expected at most {limit} as threads of one process")]
    TooManyRanks {
        /// The requested number of ranks.
        asked: usize,
        /// The maximum number of ranks.
        limit: usize,
    },
    /// The number of compute threads per rank is 0.
    #[error("invalid number of compute threads 0: expected at least 1 per rank")]
    NoComputeThreads,
    /// The number of compute threads per rank exceeds the maximum.
    #[error("invalid number of compute threads {asked}: expected at most {limit} per rank")]
    TooManyComputeThreads {
        /// The requested number of compute threads.
        asked: usize,
        /// The maximum number of compute threads.
        limit: usize,
    },
    /// The NCCL settings are invalid.
    #[error(transparent)]
    Nccl(#[from] NcclConfigError),
    /// A rank returned an error, panicked or [raised](crate::raise) an error. The failure ended all ranks.
    #[error("rank {rank} failed: {message}\n{positions}\n{}", log_line(.call_log))]
    RankFailed {
        /// The rank that failed first.
        rank: usize,
        /// The error message of the rank, including the causes of the error.
        message: String,
        /// The original error: the error that the closure returned, the raised [`CommError`], or a [`RankPanic`]. If
        /// the rank runs in another process, this is [`CommError::PeerFailed`].
        source: Box<dyn Error + Send + Sync>,
        /// A text that describes the activity of each rank at the time of the failure.
        positions: String,
        /// The path of the call log, or the reason why the call log could not be written. The first line of the call
        /// log contains the error message and the activity of each rank. The other lines contain the recent calls of
        /// all ranks, as JSON lines.
        call_log: Result<PathBuf, String>,
        /// Whether the error has already been printed. If the ranks are processes, the launcher or one of the processes
        /// prints the error to standard error immediately.
        reported: bool,
    },
    /// The environment variables of the launcher are invalid or contradict each other.
    #[error(transparent)]
    Launch(#[from] LaunchEnvError),
    /// The environment variables of a launcher are not set.
    #[error(
        "this process was not started as a rank: expected RANK and WORLD_SIZE, or the variables of srun or \
         mpirun; start it with `burn-megatron launch`, torchrun, srun or mpirun"
    )]
    NotLaunched,
    /// The requested engine is not compiled in.
    #[error("the engine {engine} is not compiled in: build with --features {feature}")]
    NotCompiled {
        /// The requested engine.
        engine: Engine,
        /// The Cargo feature that enables the engine.
        feature: &'static str,
    },
    /// The `threads` engine was requested, but the ranks are processes.
    #[error(
        "the engine `threads` requires a single process, but each of the {ranks} ranks is a process: set the engine to nccl or mpi"
    )]
    ThreadsAcrossProcesses {
        /// The number of processes.
        ranks: usize,
    },
    /// The address of the rendezvous server is not set.
    #[error(
        "the ranks of {launcher} have no rendezvous address: set MASTER_ADDR and MASTER_PORT to the machine \
         of rank 0 and a free port there, the same on all ranks"
    )]
    NoRendezvous {
        /// The launcher that started the ranks.
        launcher: Launcher,
    },
    /// The rank could not join the rendezvous.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    /// The engine could not be started.
    #[error(transparent)]
    Engine(#[from] CommError),
    /// This process has already run this rank. With NCCL, a process can run each rank only once for a rendezvous
    /// address. With MPI, a process can run only one world.
    #[error(
        "this process has already run a world with this rank: start a new process for another world"
    )]
    RanAlready,
}

impl WorldError {
    /// The exit code if this rank or its settings caused the error.
    pub const EXIT_OWN_ERROR: u8 = 1;
    /// The exit code if another rank failed.
    pub const EXIT_PEER_FAILED: u8 = 3;
    /// The exit code if this rank panicked. It is the exit code of any Rust program that panics.
    pub const EXIT_PANIC: u8 = 101;
    /// The exit code if this rank could not join the rendezvous.
    pub const EXIT_NO_RENDEZVOUS: u8 = 4;

    /// Returns the exit code that a process should use if it ends with this error.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::RankFailed { source, .. } => match source.downcast_ref::<CommError>() {
                Some(CommError::PeerFailed { .. } | CommError::PeerFinished { .. }) => {
                    Self::EXIT_PEER_FAILED
                }
                _ if source.is::<RankPanic>() => Self::EXIT_PANIC,
                _ => Self::EXIT_OWN_ERROR,
            },
            Self::Rendezvous(_) => Self::EXIT_NO_RENDEZVOUS,
            _ => Self::EXIT_OWN_ERROR,
        }
    }

    /// Creates the error of a failed rank. `reported` is true if the error has already been printed.
    pub(super) fn rank_failed(
        failure: FailureReport,
        source: Box<dyn Error + Send + Sync>,
        call_log: Result<PathBuf, String>,
        reported: bool,
    ) -> Self {
        Self::RankFailed {
            rank: failure.rank,
            message: failure.message,
            source,
            positions: failure.positions,
            call_log,
            reported,
        }
    }

    /// Returns whether the error has already been printed to standard error.
    pub fn is_reported(&self) -> bool {
        matches!(self, Self::RankFailed { reported: true, .. })
    }
}

/// The error of a rank that panicked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("panicked: {message}")]
pub struct RankPanic {
    /// The panic message.
    pub message: String,
}

pub(super) fn log_line(call_log: &Result<PathBuf, String>) -> String {
    match call_log {
        Ok(path) => format!("call log: {}", path.display()),
        Err(reason) => format!("the call log could not be written: {reason}"),
    }
}

/// Prints a text to standard error in one write, so that it does not interleave with other output. Write errors are
/// ignored.
pub(super) fn print_whole(text: &str) {
    let _ = io::stderr().write_all(text.as_bytes());
}
