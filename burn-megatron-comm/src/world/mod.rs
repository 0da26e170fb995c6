//! A world of ranks: starts them, creates their communicators, and returns the first failure.

mod error;
mod processes;
mod rank;
mod threads;
mod watchdog;

use std::env;
use std::error::Error;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use tracing::{Dispatch, dispatcher};

use crate::nccl_config::NcclConfig;
use crate::report::flight_recorder::Deadlines;
use burn_megatron_rendezvous::{Launch, MIN_HEARTBEAT_TIMEOUT};
pub use error::{RankPanic, WorldError};
pub use rank::Rank;
#[cfg(any(test, feature = "cuda", feature = "mpi"))]
pub(crate) use rank::from_panic;

/// The most ranks that [`World::threads`] starts.
pub const MAX_THREAD_RANKS: usize = 1024;

/// The most compute threads of a rank.
pub const MAX_COMPUTE_THREADS: usize = 1024;

/// A world of ranks and its settings. [`run`](Self::run) starts it.
#[derive(Clone, Debug)]
pub struct World {
    ranks: Ranks,
    deadlines: Deadlines,
    heartbeat_timeout: Duration,
    compute_threads: usize,
    grace: Option<Duration>,
    nccl: NcclConfig,
    call_log_dir: PathBuf,
}

/// The way in which the ranks run.
#[derive(Clone, Debug)]
enum Ranks {
    /// The ranks are threads of this process.
    Threads(usize),
    /// The ranks are processes, one of which is this one.
    Processes {
        launch: Launch,
        engine: Option<Engine>,
    },
}

/// The engine of the communicators.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display, strum::EnumString)]
#[strum(serialize_all = "lowercase", parse_err_ty = ParseEngineError, parse_err_fn = ParseEngineError::new)]
pub enum Engine {
    /// Shared memory, between threads of one process.
    Threads,
    /// NCCL, between GPUs; feature `cuda`.
    Nccl,
    /// MPI, between CPUs; feature `mpi`.
    Mpi,
}

/// A name that is not an engine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid engine \"{0}\": expected threads, nccl or mpi")]
pub struct ParseEngineError(String);

impl ParseEngineError {
    fn new(text: &str) -> Self {
        Self(text.into())
    }
}

impl World {
    /// A world of `size` ranks that are threads of this process.
    ///
    /// # Errors
    /// [`WorldError::NoRanks`] for 0, [`WorldError::TooManyRanks`] above [`MAX_THREAD_RANKS`].
    pub fn threads(size: usize) -> Result<World, WorldError> {
        match size {
            0 => Err(WorldError::NoRanks),
            1..=MAX_THREAD_RANKS => Ok(Self::with(Ranks::Threads(size), size, 30, 30)),
            _ => Err(WorldError::TooManyRanks {
                asked: size,
                limit: MAX_THREAD_RANKS,
            }),
        }
    }

    /// The world that this process was started in as one rank, by `burn-megatron launch`, torchrun, srun
    /// or mpirun, from their environment variables. No connection is made before [`run`](Self::run).
    ///
    /// # Errors
    /// [`WorldError::NotLaunched`] if no such variables are set, [`WorldError::Launch`] if they are invalid or
    /// contradict each other.
    pub fn from_env() -> Result<World, WorldError> {
        let launch = Launch::from_env()?.ok_or(WorldError::NotLaunched)?;
        Ok(Self::processes(launch))
    }

    /// The world of a process that was started as one rank.
    ///
    /// Over NCCL the ranks of several devices may be threads of one process instead: each calls [`run`](Self::run) of
    /// its own world, with its own rank.
    pub fn processes(launch: Launch) -> World {
        let local = launch.local_world_size;
        let engine = None;
        Self::with(Ranks::Processes { launch, engine }, local, 300, 100)
    }

    fn with(ranks: Ranks, local_ranks: usize, first: u64, later: u64) -> Self {
        let cores = thread::available_parallelism().map_or(1, |cores| cores.get());
        let [first, later] = [first, later].map(Duration::from_secs);
        Self {
            ranks,
            deadlines: Deadlines { first, later },
            heartbeat_timeout: Duration::from_secs(30),
            grace: None,
            compute_threads: (cores / local_ranks).clamp(1, MAX_COMPUTE_THREADS),
            nccl: NcclConfig::default(),
            call_log_dir: env::temp_dir(),
        }
    }

    /// Sets the engine for ranks that are processes. The default is MPI if mpirun started them, and otherwise NCCL
    /// before MPI, if compiled in. Ignored for threads.
    pub fn engine(mut self, choice: Engine) -> Self {
        if let Ranks::Processes { engine, .. } = &mut self.ranks {
            *engine = Some(choice);
        }
        self
    }

    /// Sets the deadline of all calls. The default is 30 s for threads; for processes 300 s for
    /// [first](Self::first_deadline) calls and 100 s for later ones.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadlines.later = deadline;
        self.first_deadline(deadline)
    }

    /// Sets the deadline of the first call over a group and of all calls of the first step, in which kernels are
    /// compiled and files read; and, for processes, the time for all ranks to join. Call it after
    /// [`deadline`](Self::deadline).
    pub fn first_deadline(mut self, deadline: Duration) -> Self {
        self.deadlines.first = deadline;
        self
    }

    /// Sets the time without a heartbeat after which a process counts as lost; 30 s by default, at least 1 s.
    /// Ignored for threads.
    pub fn heartbeat_timeout(mut self, timeout: Duration) -> Self {
        self.heartbeat_timeout = timeout.max(MIN_HEARTBEAT_TIMEOUT);
        self
    }

    /// Sets how long ranks that are threads may run on after one has failed. A thread in an endless loop or a
    /// blocking read cannot be stopped, and borrows from the caller of [`run`](Self::run), which therefore
    /// waits for it: by default without a limit. With a grace period the error is printed to standard error
    /// at its end, and the process exits with its [code](WorldError::exit_code). Do not set it in a program
    /// that handles errors of `run` itself. Ignored for processes, whose grace period is 5 s.
    pub fn grace(self, grace: Duration) -> Self {
        let grace = Some(grace);
        Self { grace, ..self }
    }

    /// Sets the settings of the engine `nccl`. [`Rank::engine`] reports which registered buffers and streams are in use.
    /// Other engines do not have them.
    pub fn nccl(self, nccl: NcclConfig) -> Self {
        Self { nccl, ..self }
    }

    /// Sets the compute threads of each rank; by default its share of the machine's cores, at least 1.
    pub fn compute_threads(mut self, compute_threads: usize) -> Self {
        self.compute_threads = compute_threads;
        self
    }

    /// Sets the folder for the call log of a failure; the system's temporary folder by default.
    pub fn call_log_dir(mut self, folder: impl Into<PathBuf>) -> Self {
        self.call_log_dir = folder.into();
        self
    }

    /// Checks the settings.
    ///
    /// # Errors
    /// [`WorldError::NoComputeThreads`], [`WorldError::TooManyComputeThreads`], [`WorldError::Nccl`].
    pub fn check(&self) -> Result<(), WorldError> {
        self.nccl.check()?;
        match self.compute_threads {
            0 => Err(WorldError::NoComputeThreads),
            1..=MAX_COMPUTE_THREADS => Ok(()),
            asked => Err(WorldError::TooManyComputeThreads {
                asked,
                limit: MAX_COMPUTE_THREADS,
            }),
        }
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        match &self.ranks {
            Ranks::Threads(size) => *size,
            Ranks::Processes { launch, .. } => launch.world_size,
        }
    }

    /// Runs `f` on every rank of this process and returns the results in rank order: of all ranks if they are
    /// threads, of the one rank if they are processes.
    ///
    /// Each rank has a thread `rank-N` and a private rayon pool in which `f` runs, so that the parallel
    /// loops of one rank never wait for those of another. All threads have ended when this returns. The
    /// ranks use the caller's `tracing` subscriber.
    ///
    /// Once a rank fails, every call of the others fails with
    /// [`CommError::PeerFailed`](crate::CommError::PeerFailed). A rank outside of calls is not interrupted: it
    /// fails at its next call, and if ranks are threads, this waits for it, unless a [`grace`](Self::grace)
    /// period is set. A process whose rank does not end within 5 s exits with the code
    /// [`WorldError::EXIT_PEER_FAILED`].
    ///
    /// # Errors
    /// [`WorldError::RankFailed`] with the error of the rank that failed first; the errors of
    /// [`check`](Self::check); for processes also those of launcher, rendezvous and engine.
    pub fn run<T, E>(&self, f: impl Fn(Rank) -> Result<T, E> + Sync) -> Result<Vec<T>, WorldError>
    where
        T: Send,
        E: Into<Box<dyn Error + Send + Sync>>,
    {
        self.check()?;
        let dispatch = dispatcher::get_default(Dispatch::clone);
        match &self.ranks {
            Ranks::Threads(size) => threads::run(self, *size, &dispatch, &f),
            Ranks::Processes { launch, engine } => {
                processes::run(self, launch, *engine, &dispatch, &f)
            }
        }
    }
}
