//! A world whose ranks are threads of this process.

use std::error::Error;
use std::sync::{Arc, mpsc};
use std::thread::{self, ScopedJoinHandle};

use tracing::Dispatch;

use super::rank::{AnyError, LogFolder, Rank, StopSign, from_panic, unstarted};
use super::watchdog::{self, Ended};
use super::{World, WorldError};
use crate::log::{self, Header};
use crate::threads::{Failure, ThreadCommunicator, WorldState};

/// See [`World::run`].
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
    let log_folder = LogFolder::new(world.call_log_dir.clone());
    let state_ref = &state;
    // Closed when the last rank has ended, as each has a sender.
    let (ends, ended) = mpsc::channel();
    if let Some(grace) = world.grace {
        watchdog::start(grace, size, &state, &log_folder, ended)
            .unwrap_or_else(|error| state.fail(0, unstarted(&error)));
    }
    let results: Vec<Option<T>> = thread::scope(|scope| {
        let start = |rank: Rank| {
            let builder = thread::Builder::new().name(rank.thread_name());
            let number = rank.rank;
            let ends = ends.clone();
            let tell = move |ended: Result<(), AnyError>| {
                let failed = ended.is_err();
                match ended {
                    Ok(()) => state_ref.set_returned(number),
                    Err(error) => state_ref.fail(number, error),
                }
                // Nobody listens where there is no grace.
                let _ = ends.send(Ended {
                    rank: number,
                    failed,
                });
            };
            let thread = builder.spawn_scoped(scope, move || rank.run(dispatch, f, &tell));
            thread
                .inspect_err(|error: &std::io::Error| state_ref.fail(number, unstarted(error)))
                .ok()
        };
        let ranks = ranks(world, size, &state, &log_folder).into_iter();
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
        Some(failure) => Err(report(size, &state, failure, &log_folder)),
        None if state.check().is_err() => watchdog::await_end(),
        None => Ok(results.into_iter().flatten().collect()),
    }
}

fn ranks(
    world: &World,
    size: usize,
    state: &Arc<WorldState>,
    log_folder: &Arc<LogFolder>,
) -> Vec<Rank> {
    let communicators = ThreadCommunicator::world(state, size)
        .into_iter()
        .enumerate();
    let rank = |(rank, communicator)| Rank {
        rank,
        compute_threads: world.compute_threads,
        communicator,
        journal: Arc::clone(state.journal(rank)),
        log_folder: Arc::clone(log_folder),
        stop: StopSign(Arc::new(|| false)),
        engine: "threads".into(),
    };
    communicators.map(rank).collect()
}

pub(super) fn report(
    size: usize,
    state: &WorldState,
    failure: Failure,
    folder: &LogFolder,
) -> WorldError {
    let Failure {
        rank,
        message,
        verdict,
        source,
    } = failure;
    let header = Header {
        world: size,
        failed_rank: rank,
        message: &message,
        verdict: &verdict,
    };
    let records = (0..size).flat_map(|rank| state.journal(rank).records());
    let folder = folder.path();
    let call_log = log::write(&folder, None, &header, records)
        .map_err(|error| format!("{}: {error}", folder.display()));
    WorldError::RankFailed {
        rank,
        message,
        source: source as Box<dyn Error + Send + Sync>,
        verdict,
        call_log,
        told: false,
    }
}
