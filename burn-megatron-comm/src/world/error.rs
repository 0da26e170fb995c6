//! Why a world did not give a result.

use std::error::Error;
use std::path::PathBuf;

use super::Engine;
use crate::error::CommError;
use crate::launch::{LaunchError, Launcher};
use crate::rendezvous::RendezvousError;

/// Why a world did not give a result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WorldError {
    /// A world of no ranks.
    #[error("a world needs at least 1 rank, but 0 were asked for")]
    NoRanks,
    /// More ranks than threads make sense for.
    #[error("a world of threads has at most {limit} ranks, but {asked} were asked for")]
    TooManyRanks {
        /// The ranks asked for.
        asked: usize,
        /// The most that can be had.
        limit: usize,
    },
    /// No threads to compute with.
    #[error("each rank needs at least 1 compute thread, but 0 were asked for")]
    NoComputeThreads,
    /// More threads to compute with than make sense.
    #[error("each rank has at most {limit} compute threads, but {asked} were asked for")]
    TooManyComputeThreads {
        /// The threads asked for.
        asked: usize,
        /// The most that can be had.
        limit: usize,
    },
    /// A rank returned an error, panicked or [raised](crate::raise). All others were ended.
    #[error("rank {rank} failed: {message}\n{verdict}\n{}", log_line(.call_log))]
    RankFailed {
        /// The rank that failed first.
        rank: usize,
        /// Its error, with the causes.
        message: String,
        /// The error itself: what the closure returned, the [`CommError`] that was raised, or a
        /// [`RankPanic`]; of another process, [`CommError::PeerFailed`].
        source: Box<dyn Error + Send + Sync>,
        /// One line that says where each rank stood at that moment.
        verdict: String,
        /// The file with the recent calls of all ranks as JSON lines, after a header line with the
        /// message and the verdict; or why it could not be written.
        call_log: Result<PathBuf, String>,
        /// Whether a person has been told: where ranks are processes, one of them writes this error to
        /// standard error at once, or their launcher does.
        told: bool,
    },
    /// The variables of the launcher contradict each other.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// There are no variables of a launcher.
    #[error(
        "this process was not started as a rank: no launcher's variables are set (RANK and \
         WORLD_SIZE, or those of srun or mpirun); start it with `burn-megatron launch`, torchrun, \
         srun or mpirun"
    )]
    NotLaunched,
    /// No engine for processes was compiled in, or not this one.
    #[error(
        "this binary was built without the engine {engine}; build it with --features {feature}"
    )]
    NotCompiled {
        /// The engine.
        engine: Engine,
        /// The feature that brings it.
        feature: &'static str,
    },
    /// The ranks of this world are no threads of one process.
    #[error(
        "{ranks} ranks were started as processes, and the engine threads joins the threads of one; \
         leave it out, or start one process"
    )]
    ThreadsAcrossProcesses {
        /// The processes.
        ranks: usize,
    },
    /// Nobody said where the ranks meet.
    #[error(
        "the ranks of {launcher} have no place to meet: set MASTER_ADDR and MASTER_PORT to a machine \
         and a free port of rank 0, the same for all ranks"
    )]
    NoRendezvous {
        /// Who started the ranks.
        launcher: Launcher,
    },
    /// The ranks did not find each other.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    /// The engine could not be started.
    #[error(transparent)]
    Engine(CommError),
    /// A process is a rank once.
    #[error("this process has been a rank of a world already; a world of processes runs once")]
    RanAlready,
}

/// What a process ends with after a [`WorldError`].
impl WorldError {
    /// After an error of this rank, or of its settings.
    pub const OWN: u8 = 1;
    /// After the failure of another rank.
    pub const PEER: u8 = 3;
    /// When the ranks did not find each other.
    pub const NO_WORLD: u8 = 4;

    /// The exit code: [`OWN`](Self::OWN), [`PEER`](Self::PEER) or [`NO_WORLD`](Self::NO_WORLD).
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::RankFailed { source, .. } => match source.downcast_ref::<CommError>() {
                Some(CommError::PeerFailed { .. } | CommError::PeerFinished { .. }) => Self::PEER,
                _ => Self::OWN,
            },
            Self::Rendezvous(_) => Self::NO_WORLD,
            _ => Self::OWN,
        }
    }

    /// Whether a person has been told of it already.
    pub fn is_told(&self) -> bool {
        matches!(self, Self::RankFailed { told: true, .. })
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
