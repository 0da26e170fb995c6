//! A world of ranks, which starts the ranks, creates their communicators, and returns the first failure.

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

/// The maximum number of ranks of [`World::threads`].
pub const MAX_THREAD_RANKS: usize = 1024;

/// The maximum number of compute threads per rank.
pub const MAX_COMPUTE_THREADS: usize = 1024;

/// A world of ranks, with its settings. [`run`](Self::run) starts the ranks.
///
/// ```
/// use burn_megatron_comm::World;
///
/// // If a rank fails, `run` ends all ranks and returns the error of the rank.
/// let run = World::threads(2)?.run(|rank| match rank.rank() {
///     0 => Ok(()),
///     _ => Err("no data"),
/// });
/// assert!(run.unwrap_err().to_string().starts_with("rank 1 failed: no data"));
/// # Ok::<(), burn_megatron_comm::WorldError>(())
/// ```
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

/// Whether the ranks are threads or processes.
#[derive(Clone, Debug)]
enum Ranks {
    /// The ranks are threads of this process.
    Threads(usize),
    /// The ranks are processes, and this process is one rank.
    Processes {
        launch: Launch,
        engine: Option<Engine>,
    },
}

/// An engine, which executes the operations of the communicators.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display, strum::EnumString)]
#[strum(serialize_all = "lowercase", parse_err_ty = ParseEngineError, parse_err_fn = ParseEngineError::new)]
pub enum Engine {
    /// Communication through shared memory between threads of one process.
    Threads,
    /// NCCL communication between GPUs. Requires the feature `cuda`.
    Nccl,
    /// MPI communication between CPUs. Requires the feature `mpi`.
    Mpi,
}

/// The error for a string that is not the name of an [`Engine`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid engine \"{0}\": expected threads, nccl or mpi")]
pub struct ParseEngineError(String);

impl ParseEngineError {
    fn new(text: &str) -> Self {
        Self(text.into())
    }
}

impl World {
    /// Creates a world of `size` ranks that are threads of this process.
    ///
    /// # Errors
    /// [`WorldError::NoRanks`] if `size` is 0. [`WorldError::TooManyRanks`] if `size` exceeds [`MAX_THREAD_RANKS`].
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

    /// Creates the world of a process that `burn-megatron launch`, torchrun, srun or mpirun has started as one rank.
    /// Reads the environment variables of the launcher. The process connects to the other ranks in [`run`](Self::run).
    ///
    /// # Errors
    /// [`WorldError::NotLaunched`] if no launcher's environment variables are set. [`WorldError::Launch`] if the
    /// variables are invalid or contradict each other.
    pub fn from_env() -> Result<World, WorldError> {
        let launch = Launch::from_env()?.ok_or(WorldError::NotLaunched)?;
        Ok(Self::processes(launch))
    }

    /// Creates the world of a process that was started as one rank. `launch` describes the rank.
    ///
    /// With NCCL, the ranks may also be threads of one process, each with its own device. In this case, each thread
    /// creates a world for its rank and calls [`run`](Self::run).
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

    /// Sets the engine for ranks that are processes. The default is MPI if mpirun started the ranks or if NCCL is not
    /// compiled in. Otherwise the default is NCCL. Ignored if the ranks are threads.
    pub fn engine(mut self, choice: Engine) -> Self {
        if let Ranks::Processes { engine, .. } = &mut self.ranks {
            *engine = Some(choice);
        }
        self
    }

    /// Sets the timeout of all collectives and messages. By default, the timeout for threads is 30 s. For processes it
    /// is 300 s for the [first](Self::first_deadline) calls and 100 s for later calls.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadlines.later = deadline;
        self.first_deadline(deadline)
    }

    /// Sets the timeout of the first collective of each group and of all collectives and messages in the first training
    /// step, in which kernels are compiled and files are read. For processes, this is also the timeout for all ranks to
    /// join. Call this method after [`deadline`](Self::deadline).
    pub fn first_deadline(mut self, deadline: Duration) -> Self {
        self.deadlines.first = deadline;
        self
    }

    /// Sets the heartbeat timeout: a process that sends no heartbeat for this time counts as failed. The default is 30
    /// s and the minimum is 1 s. Ignored if the ranks are threads.
    pub fn heartbeat_timeout(mut self, timeout: Duration) -> Self {
        self.heartbeat_timeout = timeout.max(MIN_HEARTBEAT_TIMEOUT);
        self
    }

    /// Sets a grace period for ranks that are threads: the time for which they may continue to run after another rank
    /// has failed. By default, there is no limit.
    ///
    /// A thread in an endless loop or a blocking read cannot be stopped. It borrows from the caller of
    /// [`run`](Self::run), so `run` must wait for the thread. If a grace period is set, the error is printed to
    /// standard error at the end of the period, and the process exits with the [exit code](WorldError::exit_code) of
    /// the error. Do not set a grace period in a program that handles the errors of `run`. Ignored if the ranks are
    /// processes, whose grace period is 5 s.
    pub fn grace(self, grace: Duration) -> Self {
        let grace = Some(grace);
        Self { grace, ..self }
    }

    /// Sets the options of the `nccl` engine. Other engines ignore these options. [`Rank::engine`] reports which
    /// registered buffers and streams are in use.
    pub fn nccl(self, nccl: NcclConfig) -> Self {
        Self { nccl, ..self }
    }

    /// Sets the number of compute threads of each rank. The default is the number of CPU cores divided by the number of
    /// ranks on this machine, but at least 1.
    pub fn compute_threads(mut self, compute_threads: usize) -> Self {
        self.compute_threads = compute_threads;
        self
    }

    /// Sets the folder in which the call log is written after a failure. The default is the temporary folder of the
    /// system.
    pub fn call_log_dir(mut self, folder: impl Into<PathBuf>) -> Self {
        self.call_log_dir = folder.into();
        self
    }

    /// Checks that the settings are valid.
    ///
    /// # Errors
    /// [`WorldError::NoComputeThreads`], [`WorldError::TooManyComputeThreads`] or [`WorldError::Nccl`] for an invalid
    /// setting.
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

    /// Returns the number of ranks in the world.
    pub fn size(&self) -> usize {
        match &self.ranks {
            Ranks::Threads(size) => *size,
            Ranks::Processes { launch, .. } => launch.world_size,
        }
    }

    /// Runs the closure `f` on every rank of this process. Returns the results in rank order. If the ranks are threads,
    /// these are the results of all ranks. If the ranks are processes, this is only the result of this process's rank.
    ///
    /// Each rank has a thread with the name `rank-N` and a private rayon thread pool in which `f` runs. Therefore,
    /// parallel loops of different ranks never wait for each other. All of these threads have ended when this method
    /// returns. The ranks use the caller's `tracing` subscriber.
    ///
    /// As soon as one rank fails, every call of the other ranks fails with
    /// [`CommError::PeerFailed`](crate::CommError::PeerFailed). A rank that is not in a call is not interrupted: it
    /// fails at its next call. If the ranks are threads, this method waits for such a rank, unless a
    /// [`grace`](Self::grace) period is set. If the ranks are processes, a process whose rank does not end within 5 s
    /// exits with code [`WorldError::EXIT_PEER_FAILED`].
    ///
    /// # Errors
    /// [`WorldError::RankFailed`], with the error of the rank that failed first. The errors of [`check`](Self::check).
    /// If the ranks are processes, also the errors of the launcher, the rendezvous and the engine.
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
