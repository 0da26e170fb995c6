//! A world of ranks: it starts them, gives each its communicator, and reports the first failure.

mod error;
mod processes;
mod rank;
mod threads;
mod watchdog;

use std::env;
use std::error::Error;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::thread;
use std::time::Duration;

use tracing::{Dispatch, dispatcher};

use super::journal::Deadlines;
use super::launch::Launch;
use super::rendezvous::LEAST_SILENCE;
pub use error::{RankPanic, WorldError};
pub use rank::Rank;

/// The most ranks that [`World::threads`] starts.
pub const MAX_THREAD_RANKS: usize = 1024;

/// The most threads that a rank computes with.
pub const MAX_COMPUTE_THREADS: usize = 1024;

/// A world of ranks and its settings. [`run`](Self::run) starts it.
#[derive(Clone, Debug)]
pub struct World {
    ranks: Ranks,
    deadlines: Deadlines,
    silence: Duration,
    compute_threads: usize,
    grace: Option<Duration>,
    registered: bool,
    call_log_dir: PathBuf,
}

/// Where the ranks are.
#[derive(Clone, Debug)]
enum Ranks {
    /// All in this process.
    Threads(usize),
    /// One in this process, the others in others.
    Processes {
        launch: Launch,
        engine: Option<Engine>,
    },
}

/// What carries the calls of the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// The memory of one process whose threads are the ranks.
    Threads,
    /// NCCL, between GPUs; feature `cuda`.
    Nccl,
    /// MPI, between CPUs; feature `mpi`.
    Mpi,
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Threads => "threads",
            Self::Nccl => "nccl",
            Self::Mpi => "mpi",
        })
    }
}

/// A name that is no engine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("\"{0}\" is no engine; threads, nccl and mpi are")]
pub struct UnknownEngine(String);

impl FromStr for Engine {
    type Err = UnknownEngine;

    fn from_str(text: &str) -> Result<Self, UnknownEngine> {
        let engines = [Self::Threads, Self::Nccl, Self::Mpi];
        let engine = engines.into_iter().find(|e| e.to_string() == text);
        engine.ok_or_else(|| UnknownEngine(text.into()))
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
    /// or mpirun; their variables say which. Nothing is contacted before [`run`](Self::run).
    ///
    /// # Errors
    /// [`WorldError::NotLaunched`] where no such variables are set, [`WorldError::Launch`] where they
    /// contradict each other.
    pub fn from_env() -> Result<World, WorldError> {
        let launch = Launch::from_env()?.ok_or(WorldError::NotLaunched)?;
        Ok(Self::processes(launch))
    }

    /// The world of a process that was started as one rank.
    pub fn processes(launch: Launch) -> World {
        let local = launch.local_world_size;
        let engine = None;
        Self::with(Ranks::Processes { launch, engine }, local, 300, 100)
    }

    fn with(ranks: Ranks, on_this_machine: usize, first: u64, then: u64) -> Self {
        let cores = thread::available_parallelism().map_or(1, |cores| cores.get());
        let [first, then] = [first, then].map(Duration::from_secs);
        Self {
            ranks,
            deadlines: Deadlines { first, then },
            silence: Duration::from_secs(30),
            grace: None,
            compute_threads: (cores / on_this_machine).clamp(1, MAX_COMPUTE_THREADS),
            registered: false,
            call_log_dir: env::temp_dir(),
        }
    }

    /// The engine that joins processes. By default MPI where mpirun started them, and else NCCL before
    /// MPI, as far as they are compiled in. It has no meaning for threads.
    pub fn engine(mut self, choice: Engine) -> Self {
        if let Ranks::Processes { engine, .. } = &mut self.ranks {
            *engine = Some(choice);
        }
        self
    }

    /// How long a rank waits in a call for the others, from the first one on; 30 s by default for threads,
    /// and for processes 300 s for the [first](Self::first_deadline) and then 100 s.
    pub fn deadline(self, deadline: Duration) -> Self {
        let deadlines = Deadlines {
            first: deadline,
            then: deadline,
        };
        Self { deadlines, ..self }
    }

    /// How long a rank waits in the first call over a group and in all calls of the first step, where
    /// kernels are compiled and files read; and, between processes, for all to come. To be set after
    /// [`deadline`](Self::deadline).
    pub fn first_deadline(mut self, deadline: Duration) -> Self {
        self.deadlines.first = deadline;
        self
    }

    /// After how long without a sign of life a process counts as lost; 30 s by default, 1 s at the least.
    /// It has no meaning for threads.
    pub fn silence(self, silence: Duration) -> Self {
        let silence = silence.max(LEAST_SILENCE);
        Self { silence, ..self }
    }

    /// How long ranks that are threads may go on after one has failed. A thread that is in an endless loop
    /// or waits for a disk cannot be ended, and borrows from the caller of [`run`](Self::run), which
    /// therefore cannot return before it: by default it waits for ever. With a grace the process is ended
    /// when it is over, with the [code](WorldError::exit_code) of the error and with the error on standard
    /// error; so a program that handles errors of `run` by itself leaves it out. It has no meaning for
    /// processes, whose grace is always 5 s.
    pub fn grace(self, grace: Duration) -> Self {
        let grace = Some(grace);
        Self { grace, ..self }
    }

    /// Whether NCCL moves large tensors through memory that is registered with it; off by default. What
    /// came of it stands in [`Rank::engine`]. It has no meaning for other engines.
    pub fn registered_buffers(self, registered: bool) -> Self {
        Self { registered, ..self }
    }

    /// The threads that each rank computes with; by default its share of the cores of its machine, at
    /// least 1.
    pub fn compute_threads(self, compute_threads: usize) -> Self {
        Self {
            compute_threads,
            ..self
        }
    }

    /// The folder in which a failure leaves its call log; the system's temporary folder by default.
    pub fn call_log_dir(self, folder: impl Into<PathBuf>) -> Self {
        Self {
            call_log_dir: folder.into(),
            ..self
        }
    }

    /// Checks what can be checked before a rank is started.
    ///
    /// # Errors
    /// [`WorldError::NoComputeThreads`], [`WorldError::TooManyComputeThreads`].
    pub fn check(&self) -> Result<(), WorldError> {
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

    /// Runs `f` on every rank of this process and returns the results in rank order: of all ranks where
    /// they are threads, of the one rank where they are processes.
    ///
    /// Each rank has a thread `rank-N` and a private rayon pool in which `f` runs, so that the parallel
    /// loops of one rank never wait for those of another. All of them have ended when this returns. The
    /// caller's `tracing` subscriber is also that of the ranks.
    ///
    /// As soon as one rank fails, every call of the others fails with
    /// [`CommError::PeerFailed`](super::CommError::PeerFailed). A rank that is in code of its own is not
    /// interrupted: it ends at its next call, and where ranks are threads, this waits for it, unless a
    /// [`grace`](Self::grace) is set. A process whose rank does not end within 5 s is ended
    /// with the code [`WorldError::PEER`], so that nothing is left running.
    ///
    /// # Errors
    /// [`WorldError::RankFailed`] with the error of the rank that failed first;
    /// what [`check`](Self::check) finds; between processes also what kept them from finding each other.
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
