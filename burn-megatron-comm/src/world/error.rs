//! The error of a world.

use std::error::Error;
use std::io::{self, Write};
use std::path::PathBuf;

use super::Engine;
use crate::error::CommError;
use crate::nccl_config::NcclConfigError;
use burn_megatron_rendezvous::{FailureReport, LaunchEnvError, Launcher, RendezvousError};

/// The reason why a world failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WorldError {
    /// The world has no ranks.
    #[error("invalid number of ranks 0: expected at least 1")]
    NoRanks,
    /// The world has more ranks than are supported as threads.
    #[error("invalid number of ranks {asked}: expected at most {limit} as threads of one process")]
    TooManyRanks {
        /// The requested number of ranks.
        asked: usize,
        /// The maximum.
        limit: usize,
    },
    /// The number of compute threads is 0.
    #[error("invalid number of compute threads 0: expected at least 1 per rank")]
    NoComputeThreads,
    /// The number of compute threads is too large.
    #[error("invalid number of compute threads {asked}: expected at most {limit} per rank")]
    TooManyComputeThreads {
        /// The requested number of threads.
        asked: usize,
        /// The maximum.
        limit: usize,
    },
    /// Invalid NCCL settings.
    #[error(transparent)]
    Nccl(#[from] NcclConfigError),
    /// A rank returned an error, panicked or [raised](crate::raise) an error, which ended all ranks.
    #[error("rank {rank} failed: {message}\n{positions}\n{}", log_line(.call_log))]
    RankFailed {
        /// The rank that failed first.
        rank: usize,
        /// The error message of the rank, with its causes.
        message: String,
        /// The original error: the error of the closure, the raised [`CommError`], or a [`RankPanic`]. For a rank of
        /// another process it is [`CommError::PeerFailed`].
        source: Box<dyn Error + Send + Sync>,
        /// A line with the activity of each rank at the time of the failure.
        positions: String,
        /// The path of the call log, or the reason why it could not be written. The log holds the recent calls of all
        /// ranks as JSON lines, after a header line with the message and the positions.
        call_log: Result<PathBuf, String>,
        /// Whether the error has been printed. If ranks are processes, one process or the launcher prints it to
        /// standard error at once.
        reported: bool,
    },
    /// The launcher's environment variables contradict each other.
    #[error(transparent)]
    Launch(#[from] LaunchEnvError),
    /// No launcher's environment variables are set.
    #[error(
        "this process was not started as a rank: expected RANK and WORLD_SIZE, or the variables of srun or \
         mpirun; start it with `burn-megatron launch`, torchrun, srun or mpirun"
    )]
    NotLaunched,
    /// The engine is not compiled in.
    #[error("the engine {engine} is not compiled in: build with --features {feature}")]
    NotCompiled {
        /// The engine.
        engine: Engine,
        /// The Cargo feature that enables the engine.
        feature: &'static str,
    },
    /// The engine `threads` was requested for ranks that are processes.
    #[error(
        "invalid engine threads for {ranks} ranks that are processes: expected nccl or mpi; or start one \
         process"
    )]
    ThreadsAcrossProcesses {
        /// The number of processes.
        ranks: usize,
    },
    /// The address of the rendezvous is not set.
    #[error(
        "the ranks of {launcher} have no rendezvous address: set MASTER_ADDR and MASTER_PORT to the machine \
         of rank 0 and a free port there, the same on all ranks"
    )]
    NoRendezvous {
        /// The launcher of the ranks.
        launcher: Launcher,
    },
    /// The rank could not join the rendezvous.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    /// The engine could not be started.
    #[error(transparent)]
    Engine(#[from] CommError),
    /// This process has already run as this rank. Over NCCL, a process can run each rank of each rendezvous address
    /// once. Over MPI, a process can run one world only.
    #[error("this process has already been this rank of the world: a world of processes runs once")]
    RanAlready,
}

impl WorldError {
    /// The exit code after an error of this rank or of its settings.
    pub const EXIT_OWN_ERROR: u8 = 1;
    /// The exit code after the failure of another rank.
    pub const EXIT_PEER_FAILED: u8 = 3;
    /// The exit code after a panic of this rank. It is the exit code of a panic in any Rust program.
    pub const EXIT_PANIC: u8 = 101;
    /// The exit code if the rank could not join the rendezvous.
    pub const EXIT_NO_RENDEZVOUS: u8 = 4;

    /// Returns the exit code of a process that ends with this error.
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

    /// Creates the error of a failed rank. `reported` is true if the error has been printed.
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

    /// Returns whether the error has been printed already.
    pub fn is_reported(&self) -> bool {
        matches!(self, Self::RankFailed { reported: true, .. })
    }
}

/// A panic of a rank.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("panicked: {message}")]
pub struct RankPanic {
    /// The message of the panic.
    pub message: String,
}

pub(super) fn log_line(call_log: &Result<PathBuf, String>) -> String {
    match call_log {
        Ok(path) => format!("call log: {}", path.display()),
        Err(reason) => format!("the call log could not be written: {reason}"),
    }
}

/// Prints a text to standard error in one write, so that it does not interleave with other output. Errors are ignored.
pub(super) fn print_whole(text: &str) {
    let _ = io::stderr().write_all(text.as_bytes());
}
