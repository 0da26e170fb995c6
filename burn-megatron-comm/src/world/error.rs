//! The error of a world.

use std::error::Error;
use std::io::{self, Write};
use std::path::PathBuf;

use super::Engine;
use crate::error::CommError;
use crate::nccl_config::NcclConfigError;
use burn_megatron_rendezvous::{FailureReport, LaunchEnvError, Launcher, RendezvousError};

/// Why a world failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WorldError {
    /// A world of no ranks.
    #[error("invalid number of ranks 0: expected at least 1")]
    NoRanks,
    /// More ranks than are supported as threads.
    #[error("invalid number of ranks {asked}: expected at most {limit} as threads of one process")]
    TooManyRanks {
        /// The requested ranks.
        asked: usize,
        /// The maximum.
        limit: usize,
    },
    /// No compute threads.
    #[error("invalid number of compute threads 0: expected at least 1 per rank")]
    NoComputeThreads,
    /// Too many compute threads.
    #[error("invalid number of compute threads {asked}: expected at most {limit} per rank")]
    TooManyComputeThreads {
        /// The requested threads.
        asked: usize,
        /// The maximum.
        limit: usize,
    },
    /// Settings that NCCL does not take.
    #[error(transparent)]
    Nccl(#[from] NcclConfigError),
    /// A rank returned an error, panicked or [raised](crate::raise) one, which ended all ranks.
    #[error("rank {rank} failed: {message}\n{positions}\n{}", log_line(.call_log))]
    RankFailed {
        /// The rank that failed first.
        rank: usize,
        /// Its error, with its sources.
        message: String,
        /// The error itself: that of the closure, the [`CommError`] that was raised, or a [`RankPanic`]; for a
        /// rank of another process, [`CommError::PeerFailed`].
        source: Box<dyn Error + Send + Sync>,
        /// One line that describes what each rank was doing at that moment.
        positions: String,
        /// The file with the recent calls of all ranks as JSON lines, after a header line with the message and
        /// the positions; or why it could not be written.
        call_log: Result<PathBuf, String>,
        /// Whether the error has been printed: if ranks are processes, one of them prints it to standard error
        /// at once, or their launcher does.
        reported: bool,
    },
    /// The variables of the launcher contradict each other.
    #[error(transparent)]
    Launch(#[from] LaunchEnvError),
    /// No launcher's variables are set.
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
        /// The feature that enables it.
        feature: &'static str,
    },
    /// The engine threads was requested for ranks that are processes.
    #[error(
        "invalid engine threads for {ranks} ranks that are processes: expected nccl or mpi; or start one \
         process"
    )]
    ThreadsAcrossProcesses {
        /// The processes.
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
    /// The process has already been this rank of the world: over NCCL of that at the address of the rendezvous, over MPI
    /// of any.
    #[error("this process has already been this rank of the world: a world of processes runs once")]
    RanAlready,
}

impl WorldError {
    /// The exit code after an error of this rank or of its settings.
    pub const EXIT_OWN_ERROR: u8 = 1;
    /// The exit code after the failure of another rank.
    pub const EXIT_PEER_FAILED: u8 = 3;
    /// The exit code after a panic of this rank, as of any Rust program.
    pub const EXIT_PANIC: u8 = 101;
    /// The exit code if the rank could not join the rendezvous.
    pub const EXIT_NO_RENDEZVOUS: u8 = 4;

    /// The exit code of a process that ends with this error.
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

    /// The failure of a rank, with its error itself. `reported` says whether it has been printed.
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

    /// Whether the error has been printed already.
    pub fn is_reported(&self) -> bool {
        matches!(self, Self::RankFailed { reported: true, .. })
    }
}

/// A rank panicked.
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

/// Prints a text to standard error in one write, so that the output of others does not interleave. Errors are ignored.
pub(super) fn print_whole(text: &str) {
    let _ = io::stderr().write_all(text.as_bytes());
}
