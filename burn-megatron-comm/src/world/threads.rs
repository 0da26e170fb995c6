//! A world whose ranks are threads of this process.

use std::sync::{Arc, mpsc};
use std::thread::{self, ScopedJoinHandle};

use tracing::Dispatch;

use super::rank::{AnyError, CallLogDir, Rank, from_panic, start_error};
use super::watchdog::{self, RankEnded};
use super::{World, WorldError};
use crate::engines::threads::{RankFailure, ThreadCommunicator, WorldState};

/// Implements [`World::run`] for ranks that are threads.
pub(super) fn run<T, E>(
    world: &World,
    size: usize,
    dispatch: &Dispatch,
    f: &(impl Fn(Rank) -> Result<T, E> + Sync),
) -> Result<Vec<T>, WorldError>
where
    T: Send,
    E: Into<AnyError>,
{
    let state = WorldState::new(size, world.deadlines);
    let call_log_dir = CallLogDir::new(world.call_log_dir.clone());
    let state_ref = &state;
    // The channel closes when the last rank has ended, because every rank holds a sender.
    let (ends, ended) = mpsc::channel();
    if let Some(grace) = world.grace {
        watchdog::start(grace, size, &state, &call_log_dir, ended)
            .unwrap_or_else(|error| state.fail(0, start_error(&error)));
    }
    let results: Vec<Option<T>> = thread::scope(|scope| {
        let start = |rank: Rank| {
            let builder = thread::Builder::new().name(rank.thread_name());
            let number = rank.rank;
            let ends = ends.clone();
            let report_end = move |ended: Result<(), AnyError>| {
                let failed = ended.is_err();
                match ended {
                    Ok(()) => state_ref.set_returned(number),
                    Err(error) => state_ref.fail(number, error),
                }
                // Without a grace period there is no receiver.
                let _ = ends.send(RankEnded {
                    rank: number,
                    failed,
                });
            };
            let thread = builder.spawn_scoped(scope, move || rank.run(dispatch, f, &report_end));
            thread
                .inspect_err(|error: &std::io::Error| state_ref.fail(number, start_error(error)))
                .ok()
        };
        let ranks = ranks(world, size, &state, &call_log_dir).into_iter();
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
        Some(failure) => Err(rank_failed(size, &state, failure, &call_log_dir)),
        None if state.check().is_err() => watchdog::wait_for_exit(),
        None => Ok(results.into_iter().flatten().collect()),
    }
}

fn ranks(
    world: &World,
    size: usize,
    state: &Arc<WorldState>,
    call_log_dir: &Arc<CallLogDir>,
) -> Vec<Rank> {
    let communicators = ThreadCommunicator::world(state, size)
        .into_iter()
        .enumerate();
    let rank = |(rank, communicator)| Rank {
        rank,
        compute_threads: world.compute_threads,
        communicator,
        recorder: Arc::clone(state.recorder(rank)),
        call_log_dir: Arc::clone(call_log_dir),
        stop: Arc::new(|| false),
        engine: Arc::new(|| "threads".into()),
    };
    communicators.map(rank).collect()
}

/// Writes the call log and returns the error of the world.
pub(super) fn rank_failed(
    size: usize,
    state: &WorldState,
    failure: RankFailure,
    call_log_dir: &CallLogDir,
) -> WorldError {
    let RankFailure { report, source } = failure;
    let records = (0..size).flat_map(|rank| state.recorder(rank).records());
    let call_log = call_log_dir.write(None, size, &report, records);
    WorldError::rank_failed(report, source, call_log, false)
}
