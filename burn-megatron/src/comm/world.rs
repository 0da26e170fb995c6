//! A world of ranks: it starts them, gives each its communicator, and reports the first failure.

use std::any::Any;
use std::env;
use std::error::Error;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::{self, ScopedJoinHandle};
use std::time::Duration;

use rayon::{ThreadPoolBuildError, ThreadPoolBuilder};
use tracing::subscriber::NoSubscriber;
use tracing::{Dispatch, dispatcher};

use super::communicator::Communicator;
use super::error::CommError;
use super::log::{self, CallRecord, Header};
use super::threads::{Failure, ThreadCommunicator, WorldState};

/// The most ranks that [`World::threads`] starts.
pub const MAX_THREAD_RANKS: usize = 1024;

/// As much as the main thread of a program usually has; it is reserved, not used.
const STACK_BYTES: usize = 8 << 20;

/// A world of ranks and its settings. [`run`](Self::run) starts it, and may do so again.
#[derive(Clone, Debug)]
pub struct World {
    size: usize,
    deadline: Duration,
    compute_threads: usize,
    call_log_dir: PathBuf,
}

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
    /// A rank returned an error, panicked or [raised](super::raise). All others were ended.
    #[error("rank {rank} failed: {message}\n{verdict}\n{}", log_line(.call_log))]
    RankFailed {
        /// The rank that failed first.
        rank: usize,
        /// Its error, with the causes.
        message: String,
        /// The error itself: what the closure returned, the [`CommError`] that was raised, or a
        /// [`RankPanic`].
        source: Box<dyn Error + Send + Sync>,
        /// One line that says where each rank stood at that moment.
        verdict: String,
        /// The file with the recent calls of all ranks as JSON lines, after a header line with the
        /// message and the verdict; or why it could not be written.
        call_log: Result<PathBuf, String>,
    },
}

/// A rank panicked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("panicked: {message}")]
pub struct RankPanic {
    /// The message of the panic.
    pub message: String,
}

fn log_line(call_log: &Result<PathBuf, String>) -> String {
    match call_log {
        Ok(path) => format!("call log: {}", path.display()),
        Err(reason) => format!("the call log could not be written: {reason}"),
    }
}

impl World {
    /// A world of `size` ranks that are threads of this process.
    ///
    /// # Errors
    /// [`WorldError::NoRanks`] for 0, [`WorldError::TooManyRanks`] above [`MAX_THREAD_RANKS`].
    pub fn threads(size: usize) -> Result<World, WorldError> {
        match size {
            0 => return Err(WorldError::NoRanks),
            1..=MAX_THREAD_RANKS => {}
            _ => {
                return Err(WorldError::TooManyRanks {
                    asked: size,
                    limit: MAX_THREAD_RANKS,
                });
            }
        }
        let cores = thread::available_parallelism().map_or(1, |cores| cores.get());
        Ok(World {
            size,
            deadline: Duration::from_secs(30),
            compute_threads: (cores / size).max(1),
            call_log_dir: env::temp_dir(),
        })
    }

    /// How long a rank waits in a call for the others; 30 s by default.
    pub fn deadline(self, deadline: Duration) -> Self {
        Self { deadline, ..self }
    }

    /// The threads that each rank computes with; by default its share of the cores, at least 1.
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

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Runs `f` on every rank and returns the results in rank order.
    ///
    /// Each rank has a thread `rank-N` and a private rayon pool in which `f` runs, so that the parallel
    /// loops of one rank never wait for those of another. All of them have ended when this returns. The
    /// caller's `tracing` subscriber is also that of the ranks.
    ///
    /// As soon as one rank fails, every call of the others fails with [`CommError::PeerFailed`]. A rank
    /// that is in code of its own is not interrupted: it ends at its next call.
    ///
    /// # Errors
    /// [`WorldError::RankFailed`] with the error of the rank that failed first;
    /// [`WorldError::NoComputeThreads`].
    pub fn run<T, E>(&self, f: impl Fn(Rank) -> Result<T, E> + Sync) -> Result<Vec<T>, WorldError>
    where
        T: Send,
        E: Into<Box<dyn Error + Send + Sync>>,
    {
        if self.compute_threads == 0 {
            return Err(WorldError::NoComputeThreads);
        }
        let state = WorldState::new(self.size, self.deadline);
        let dispatch = dispatcher::get_default(Dispatch::clone);
        let (state_ref, dispatch, f) = (&state, &dispatch, &f);
        let results: Vec<Option<T>> = thread::scope(|scope| {
            let ranks = self.ranks(&state).into_iter();
            let start = |rank: Rank| {
                let builder = thread::Builder::new().name(rank.thread_name());
                let number = rank.rank;
                let thread = builder.spawn_scoped(scope, move || rank.run(dispatch, f));
                thread
                    .inspect_err(|error| state_ref.fail(number, unstarted(error)))
                    .ok()
            };
            let started: Vec<_> = ranks.map(start).collect();
            let join = |(rank, thread): (usize, Option<ScopedJoinHandle<'_, Option<T>>>)| {
                thread?.join().unwrap_or_else(|payload| {
                    state_ref.fail(rank, from_panic(payload));
                    None
                })
            };
            started.into_iter().enumerate().map(join).collect()
        });
        match state.take_failure() {
            Some(failure) => Err(self.report(&state, failure)),
            None => Ok(results.into_iter().flatten().collect()),
        }
    }

    fn ranks(&self, state: &Arc<WorldState>) -> Vec<Rank> {
        let communicators = ThreadCommunicator::world(state, self.size)
            .into_iter()
            .enumerate();
        let rank = |(rank, communicator)| Rank {
            rank,
            compute_threads: self.compute_threads,
            communicator,
            state: Arc::clone(state),
        };
        communicators.map(rank).collect()
    }

    fn report(&self, state: &WorldState, failure: Failure) -> WorldError {
        let Failure {
            rank,
            message,
            verdict,
            source,
        } = failure;
        let header = Header {
            world: self.size,
            failed_rank: rank,
            message: &message,
            verdict: &verdict,
        };
        let records = (0..self.size).flat_map(|rank| state.records(rank));
        let call_log = log::write(&self.call_log_dir, &header, records)
            .map_err(|error| format!("{}: {error}", self.call_log_dir.display()));
        WorldError::RankFailed {
            rank,
            message,
            source,
            verdict,
            call_log,
        }
    }
}

fn unstarted(error: &dyn Error) -> Box<dyn Error + Send + Sync> {
    format!("the threads of the rank could not be started: {error}").into()
}

/// One rank of a running world, as its closure sees it.
#[derive(Clone)]
pub struct Rank {
    rank: usize,
    compute_threads: usize,
    communicator: Arc<dyn Communicator>,
    state: Arc<WorldState>,
}

impl Rank {
    /// The number of this rank, from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of ranks in the world.
    pub fn size(&self) -> usize {
        self.communicator.size()
    }

    /// The communicator of the group of all ranks.
    pub fn communicator(&self) -> Arc<dyn Communicator> {
        Arc::clone(&self.communicator)
    }

    /// The threads that this rank computes with.
    pub fn compute_threads(&self) -> usize {
        self.compute_threads
    }

    /// The last [`CALLS_KEPT`](super::CALLS_KEPT) calls of this rank, the oldest first.
    pub fn recent_calls(&self) -> Vec<CallRecord> {
        self.state.records(self.rank)
    }

    fn thread_name(&self) -> String {
        format!("rank-{}", self.rank)
    }

    /// Runs the closure to its end and tells the others how it ended.
    fn run<T: Send, E: Into<Box<dyn Error + Send + Sync>>>(
        self,
        dispatch: &Dispatch,
        f: &(impl Fn(Rank) -> Result<T, E> + Sync),
    ) -> Option<T> {
        let (rank, state) = (self.rank, Arc::clone(&self.state));
        let (name, threads) = (self.thread_name(), self.compute_threads);
        let ended = in_pool(&name, threads, dispatch, || {
            let ended = catch_unwind(AssertUnwindSafe(|| f(self).map_err(Into::into)));
            // Told from inside the pool: the others need not wait until its threads have ended.
            match ended.unwrap_or_else(|payload| Err(from_panic(payload))) {
                Ok(value) => {
                    state.set_returned(rank);
                    Some(value)
                }
                Err(error) => {
                    state.fail(rank, error);
                    None
                }
            }
        });
        ended.unwrap_or_else(|error| {
            state.fail(rank, unstarted(&error));
            None
        })
    }
}

impl fmt::Debug for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Rank({} of {})", self.rank, self.size())
    }
}

/// The error that a panic carried.
fn from_panic(payload: Box<dyn Any + Send>) -> Box<dyn Error + Send + Sync> {
    let payload = match payload.downcast::<CommError>() {
        Ok(raised) => return raised,
        Err(payload) => payload,
    };
    let message = payload
        .downcast_ref::<&str>()
        .map(|message| (*message).to_owned())
        .or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "with a payload that is no text".to_owned());
    Box::new(RankPanic { message })
}

/// Runs `f` in a private pool whose threads have ended when this returns.
fn in_pool<R: Send>(
    name: &str,
    threads: usize,
    dispatch: &Dispatch,
    f: impl FnOnce() -> R + Send,
) -> Result<R, ThreadPoolBuildError> {
    let mut workers = Vec::new();
    let pool = ThreadPoolBuilder::new()
        .num_threads(threads)
        .spawn_handler(|worker| {
            // Without a subscriber, one that is set later is to be seen.
            let dispatch = Some(dispatch.clone()).filter(|d| !d.is::<NoSubscriber>());
            let builder = thread::Builder::new()
                .name(name.to_owned())
                .stack_size(STACK_BYTES);
            let work = move || match dispatch {
                Some(dispatch) => dispatcher::with_default(&dispatch, || worker.run()),
                None => worker.run(),
            };
            workers.push(builder.spawn(work)?);
            Ok(())
        });
    let pool = pool.build();
    // The pool goes away with this call, which tells its threads to end.
    let result = pool.map(|pool| pool.install(f));
    for worker in workers {
        // A worker gives no value, and the panics of its tasks have reached `f`.
        let _ = worker.join();
    }
    result
}
