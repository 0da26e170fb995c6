//! One rank of a running world, and the threads that it works with.

use std::any::Any;
use std::error::Error;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use rayon::{ThreadPoolBuildError, ThreadPoolBuilder};
use tracing::subscriber::NoSubscriber;
use tracing::{Dispatch, dispatcher};

use super::RankPanic;
use crate::communicator::Communicator;
use crate::error::CommError;
use crate::journal::Journal;
use crate::log::CallRecord;

/// As much as the main thread of a program usually has; it is reserved, not used.
const STACK_BYTES: usize = 8 << 20;

/// The error of a rank.
pub(super) type AnyError = Box<dyn Error + Send + Sync>;

/// Where a failure leaves its call log.
#[derive(Debug)]
pub(super) struct LogFolder(Mutex<PathBuf>);

impl LogFolder {
    pub fn new(folder: PathBuf) -> Arc<Self> {
        Arc::new(Self(Mutex::new(folder)))
    }

    pub fn path(&self) -> PathBuf {
        let folder = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        folder.clone()
    }

    fn set(&self, folder: PathBuf) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = folder;
    }
}

/// One rank of a running world, as its closure sees it.
#[derive(Clone)]
pub struct Rank {
    pub(super) rank: usize,
    pub(super) compute_threads: usize,
    pub(super) communicator: Arc<dyn Communicator>,
    pub(super) journal: Arc<Journal>,
    pub(super) log_folder: Arc<LogFolder>,
    pub(super) stop: StopSign,
    pub(super) engine: Arc<str>,
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

    /// The engine that joins the ranks, in words: its name, and of a library its version.
    pub fn engine(&self) -> &str {
        &self.engine
    }

    /// The threads that this rank computes with.
    pub fn compute_threads(&self) -> usize {
        self.compute_threads
    }

    /// The last [`CALLS_KEPT`](crate::CALLS_KEPT) calls of this rank, the oldest first.
    pub fn recent_calls(&self) -> Vec<CallRecord> {
        self.journal.records()
    }

    /// From now on a failure leaves its call log in this folder.
    pub fn write_call_logs_to(&self, folder: impl Into<PathBuf>) {
        self.log_folder.set(folder.into());
    }

    /// Whether the launcher asks this rank to end the step in hand and to stop; the ranks agree on it by
    /// a collective.
    pub fn stop_requested(&self) -> bool {
        (self.stop.0)()
    }

    #[cfg(test)]
    pub(crate) fn journal(&self) -> &Arc<Journal> {
        &self.journal
    }

    pub(super) fn thread_name(&self) -> String {
        format!("rank-{}", self.rank)
    }

    /// Runs the closure to its end and tells how it ended: from inside of its pool, so that nobody waits
    /// until the threads have ended.
    pub(super) fn run<T: Send, E: Into<AnyError>>(
        self,
        dispatch: &Dispatch,
        f: &(impl Fn(Rank) -> Result<T, E> + Sync),
        tell: &(impl Fn(Result<(), AnyError>) + Sync),
    ) -> Option<T> {
        let (name, threads) = (self.thread_name(), self.compute_threads);
        let ended = in_pool(&name, threads, dispatch, || {
            let ended = catch_unwind(AssertUnwindSafe(|| f(self).map_err(Into::into)));
            match ended.unwrap_or_else(|payload| Err(from_panic(payload))) {
                Ok(value) => {
                    tell(Ok(()));
                    Some(value)
                }
                Err(error) => {
                    tell(Err(error));
                    None
                }
            }
        });
        ended.unwrap_or_else(|error| {
            tell(Err(unstarted(&error)));
            None
        })
    }
}

/// Asks whether to stop.
#[derive(Clone)]
pub(super) struct StopSign(pub Arc<dyn Fn() -> bool + Send + Sync>);

pub(super) fn unstarted(error: &dyn Error) -> AnyError {
    format!("the threads of the rank could not be started: {error}").into()
}

impl fmt::Debug for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Rank({} of {})", self.rank, self.size())
    }
}

/// The error that a panic carried.
pub(super) fn from_panic(payload: Box<dyn Any + Send>) -> Box<dyn Error + Send + Sync> {
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
