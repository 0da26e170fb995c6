//! One rank of a running world, and its threads.

use std::any::Any;
use std::error::Error;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;
use rayon::{ThreadPoolBuildError, ThreadPoolBuilder};
use tracing::subscriber::NoSubscriber;
use tracing::{Dispatch, dispatcher};

use super::RankPanic;
use crate::communicator::Communicator;
use crate::error::CommError;
use crate::report::call_log::{self, CallRecord};
use crate::report::flight_recorder::FlightRecorder;
use burn_megatron_rendezvous::FailureReport;

/// The usual stack size of the main thread of a program. The memory is reserved but not committed.
const STACK_BYTES: usize = 8 << 20;

/// The error of a rank.
pub(super) type AnyError = Box<dyn Error + Send + Sync>;

/// The folder for the call log of a failure.
#[derive(Debug)]
pub(super) struct CallLogDir(Mutex<PathBuf>);

impl CallLogDir {
    pub fn new(folder: PathBuf) -> Arc<Self> {
        Arc::new(Self(Mutex::new(folder)))
    }

    fn set(&self, folder: PathBuf) {
        *self.0.lock() = folder;
    }

    /// Writes the call log of a world of `size` ranks. It contains the calls of `rank`, or the calls of all ranks if
    /// `rank` is `None`.
    ///
    /// # Errors
    /// The reason why the file could not be written.
    pub fn write(
        &self,
        rank: Option<usize>,
        size: usize,
        failure: &FailureReport,
        records: impl IntoIterator<Item = CallRecord>,
    ) -> Result<PathBuf, String> {
        let folder = self.0.lock().clone();
        let written = call_log::write(&folder, rank, size, failure, records);
        written.map_err(|error| format!("{}: {error}", folder.display()))
    }
}

/// One rank of a running world. [`World::run`](crate::World::run) passes it to the closure.
///
/// ```
/// use burn_megatron_comm::{CommError, World};
///
/// let world = World::threads(3)?.compute_threads(1);
/// let ranks = world.run(|rank| Ok::<_, CommError>((rank.rank(), rank.size())))?;
/// assert_eq!(ranks, [(0, 3), (1, 3), (2, 3)]);
/// # Ok::<(), burn_megatron_comm::WorldError>(())
/// ```
#[derive(Clone)]
pub struct Rank {
    pub(super) rank: usize,
    pub(super) compute_threads: usize,
    pub(super) communicator: Arc<dyn Communicator>,
    pub(super) recorder: Arc<FlightRecorder>,
    pub(super) call_log_dir: Arc<CallLogDir>,
    /// A function that returns whether the rank should stop.
    pub(super) stop: Arc<dyn Fn() -> bool + Send + Sync>,
    /// A function that describes the current state of the engine.
    pub(super) engine: Arc<dyn Fn() -> String + Send + Sync>,
}

impl Rank {
    /// Returns the number of this rank in the world, counted from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of ranks in the world.
    pub fn size(&self) -> usize {
        self.communicator.size()
    }

    /// Returns the communicator of the group of all ranks.
    pub fn communicator(&self) -> Arc<dyn Communicator> {
        Arc::clone(&self.communicator)
    }

    /// Describes the engine: its name, the version of its library, and the features in use. For NCCL, the text also
    /// contains the amount of data that has been copied to and from registered buffers.
    pub fn engine(&self) -> String {
        (self.engine)()
    }

    /// Returns the number of compute threads of this rank.
    pub fn compute_threads(&self) -> usize {
        self.compute_threads
    }

    /// Returns the records of the last [`CALLS_KEPT`](crate::CALLS_KEPT) calls of this rank, oldest first.
    pub fn recent_calls(&self) -> Vec<CallRecord> {
        self.recorder.records()
    }

    /// Returns the time since the start of the world. The times of [`recent_calls`](Self::recent_calls) count from the
    /// same moment.
    pub fn elapsed(&self) -> Duration {
        self.recorder.elapsed()
    }

    /// Sets the folder in which the call log is written after a later failure.
    pub fn write_call_logs_to(&self, folder: impl Into<PathBuf>) {
        self.call_log_dir.set(folder.into());
    }

    /// Returns whether the launcher requests that this rank stops after the current step. Different ranks may get
    /// different results at the same time. Use a collective to reach agreement between the ranks.
    pub fn stop_requested(&self) -> bool {
        (self.stop)()
    }

    #[cfg(test)]
    pub(crate) fn recorder(&self) -> &Arc<FlightRecorder> {
        &self.recorder
    }

    pub(super) fn thread_name(&self) -> String {
        format!("rank-{}", self.rank)
    }

    /// Runs the closure and reports its result. The result is reported from within the thread pool, so that the report
    /// does not wait until the threads have ended.
    pub(super) fn run<T: Send, E: Into<AnyError>>(
        self,
        dispatch: &Dispatch,
        f: &(impl Fn(Rank) -> Result<T, E> + Sync),
        report_end: &(impl Fn(Result<(), AnyError>) + Sync),
    ) -> Option<T> {
        let (name, threads) = (self.thread_name(), self.compute_threads);
        let ended = in_pool(&name, threads, dispatch, || {
            let ended = catch_unwind(AssertUnwindSafe(|| f(self).map_err(Into::into)));
            match ended.unwrap_or_else(|payload| Err(from_panic(payload))) {
                Ok(value) => {
                    report_end(Ok(()));
                    Some(value)
                }
                Err(error) => {
                    report_end(Err(error));
                    None
                }
            }
        });
        ended.unwrap_or_else(|error| {
            report_end(Err(start_error(&error)));
            None
        })
    }
}

pub(super) fn start_error(error: &dyn Error) -> AnyError {
    format!("cannot start the threads of the rank: {error}").into()
}

impl fmt::Debug for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Rank({} of {})", self.rank, self.size())
    }
}

/// Converts the payload of a panic into an error.
pub(crate) fn from_panic(payload: Box<dyn Any + Send>) -> Box<dyn Error + Send + Sync> {
    let payload = match payload.downcast::<CommError>() {
        Ok(raised) => return raised,
        Err(payload) => payload,
    };
    let message = payload
        .downcast_ref::<&str>()
        .map(|message| (*message).to_owned())
        .or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "with a payload that is not text".to_owned());
    Box::new(RankPanic { message })
}

/// Runs `f` in a private thread pool. All threads of the pool have ended when this function returns.
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
            // Without a subscriber, a global subscriber that is set later is used.
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
    // The pool is dropped here, which ends its threads.
    let result = pool.map(|pool| pool.install(f));
    for worker in workers {
        // Panics of tasks have been propagated to `f`.
        let _ = worker.join();
    }
    result
}
