//! The creation of communicators from unique ids. Each set of communicators is created on a separate thread, because
//! ids may arrive late. The initialization must not block the thread of the worker, on which NCCL may allow only one
//! NCCL group in progress.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::AtomicPtr;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::Duration;

use super::api::UniqueId;
use super::communicator::CommKey;
use super::driver::Stream;
use super::engine_state::{EngineState, WorkerCommand};
use super::library::{Comm, InitRequest, Progress};
use super::plan::NcclPlan;
use crate::nccl_config::NcclGroup;

/// The sleep time between two polls.
const POLL_INTERVAL: Duration = Duration::from_micros(200);

/// The parameters of a new communicator, from the view of this rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Opening {
    pub key: CommKey,
    pub rank: usize,
    pub size: usize,
    /// The kind of group whose settings apply to the communicator.
    pub group: NcclGroup,
}

/// Starts to create communicators, each with its stream. Several communicators are created as one NCCL group. Rank 0 of
/// each communicator publishes the unique id. When a communicator has been created, the worker receives a
/// [`WorkerCommand::Opened`].
///
/// # Errors
/// A message if no thread can be started.
pub(super) fn begin(
    openings: Vec<(Opening, Stream)>,
    state: &Arc<EngineState>,
    worker: &Sender<WorkerCommand>,
) -> Result<(), String> {
    let (state, worker) = (state.clone(), worker.clone());
    let open = move || {
        let results = open(&openings, &state);
        for ((opening, _), result) in openings.iter().zip(results) {
            let key = opening.key;
            // The worker may have ended. It has then aborted all communicators.
            let _ = worker.send(WorkerCommand::Opened { key, result });
        }
    };
    let builder = thread::Builder::new().name("nccl-init".into());
    let started = builder.spawn(open);
    started
        .map(drop)
        .map_err(|error| format!("cannot start a thread: {error}"))
}

/// Creates communicators. Returns each communicator when it is ready, or the reason why it could not be created.
fn open(openings: &[(Opening, Stream)], state: &EngineState) -> Vec<Result<Comm, String>> {
    let slots: Vec<_> = openings.iter().map(|_| slot()).collect();
    match init(openings, &slots, state) {
        Ok(comms) => {
            let ready = await_ready(&comms, state);
            let ready = connect_messages(openings, ready, state);
            if ready.iter().any(Result::is_err) {
                // The library may still write to the slots.
                std::mem::forget(slots);
            }
            // This happens only now, because older versions end the whole group with its first communicator.
            let end = |result: Result<Comm, String>| {
                let comm = result?;
                let ended = state.comms.with(comm, || state.library.end_init(comm));
                ended.map(|()| comm)
            };
            ready.into_iter().map(end).collect()
        }
        Err(reason) => openings.iter().map(|_| Err(reason.clone())).collect(),
    }
}

/// Allocates the memory to which NCCL writes a communicator.
pub(super) fn slot() -> Box<AtomicPtr<c_void>> {
    Box::new(AtomicPtr::new(ptr::null_mut()))
}

fn init(
    openings: &[(Opening, Stream)],
    slots: &[Box<AtomicPtr<c_void>>],
    state: &EngineState,
) -> Result<Vec<Comm>, String> {
    // All ids are published before the first id is read, because another rank may read before it publishes.
    let published: Result<Vec<_>, _> = openings
        .iter()
        .map(|(opening, _)| (opening.rank == 0).then(|| publish(opening.key, state)))
        .map(Option::transpose)
        .collect();
    let ids: Result<Vec<_>, _> = openings
        .iter()
        .zip(published?)
        .map(|((opening, _), own)| own.map_or_else(|| read(opening.key, state), Ok))
        .collect();
    state.driver.make_current()?;
    state.driver.ignore_captures()?;
    let requests: Vec<_> = openings
        .iter()
        .zip(ids?)
        .zip(slots)
        .map(|(((opening, _), id), slot)| InitRequest {
            id,
            rank: opening.rank,
            size: opening.size,
            config: state.config.group(opening.group),
            slot,
        })
        .collect();
    state
        .comms
        .add_all(|| state.library.init(&requests), &state.library)
}

/// Polls until each communicator is ready or has failed. An abort ends the polling.
fn await_ready(comms: &[Comm], state: &EngineState) -> Vec<Result<Comm, String>> {
    let mut results: Vec<Option<Result<Comm, String>>> = vec![None; comms.len()];
    loop {
        let waiting = comms
            .iter()
            .zip(&mut results)
            .filter(|(_, result)| result.is_none());
        for (comm, result) in waiting {
            let polled = state.comms.with(*comm, || state.library.poll(*comm));
            *result = match polled {
                Ok(Progress::Running) => None,
                Ok(Progress::Done) => Some(Ok(*comm)),
                Err(reason) => Some(Err(reason)),
            };
        }
        if results.iter().all(Option::is_some) {
            break;
        }
        thread::sleep(POLL_INTERVAL);
    }
    results.into_iter().flatten().collect()
}

/// Connects the two ranks of each message communicator. This is required for NCCL versions in which a thread can have
/// only one NCCL group in progress. In these versions, the launch of the first message waits until the other rank
/// launches it too. This would block all other launches of the worker, including launches for which the other rank
/// waits. Here it does not block, because both ranks are creating the communicator at this time.
fn connect_messages(
    openings: &[(Opening, Stream)],
    ready: Vec<Result<Comm, String>>,
    state: &EngineState,
) -> Vec<Result<Comm, String>> {
    if state.library.has_concurrent_groups() {
        return ready;
    }
    let of_messages = openings.iter().zip(&ready).filter_map(|(at, comm)| {
        let is_message = matches!(at.0.key, CommKey::Message { .. });
        Some((at, comm.as_ref().ok().copied()?)).filter(|_| is_message)
    });
    let messages: Vec<(&(Opening, Stream), Comm)> = of_messages.collect();
    match connect(&messages, state) {
        Ok(()) => ready,
        Err(reason) => ready
            .into_iter()
            .map(|result| result.and(Err(reason.clone())))
            .collect(),
    }
}

/// Sends one byte over each message communicator, as one NCCL group.
fn connect(messages: &[(&(Opening, Stream), Comm)], state: &EngineState) -> Result<(), String> {
    let (library, driver) = (&state.library, &state.driver);
    let Some((_, first)) = messages.first() else {
        return Ok(());
    };
    let memory = messages
        .iter()
        .map(|((_, stream), _)| driver.allocate(1, *stream));
    let memory: Vec<u64> = memory.collect::<Result<_, _>>()?;
    state.comms.with(*first, || {
        library.group_start()?;
        let mut sent = Ok(());
        for (((opening, stream), comm), address) in messages.iter().zip(&memory) {
            let plan = NcclPlan::byte(opening.rank);
            // SAFETY: the memory has one byte and is freed in stream order.
            let send =
                || unsafe { library.run(plan.steps[0], &plan, [*address; 2], *comm, *stream) };
            sent = sent.and_then(|()| send());
        }
        let ended = library.group_end();
        sent.and(ended.map(drop))
    })?;
    let comms: Vec<Comm> = messages.iter().map(|(_, comm)| *comm).collect();
    for result in await_ready(&comms, state) {
        result?;
    }
    for (((_, stream), _), address) in messages.iter().zip(memory) {
        driver.free(address, *stream);
    }
    Ok(())
}

fn publish(key: CommKey, state: &EngineState) -> Result<UniqueId, String> {
    let id = state.library.unique_id()?;
    let stored = state.store.post(&key.store_key(), &id.0);
    stored.map(|()| id).map_err(|error| error.to_string())
}

fn read(key: CommKey, state: &EngineState) -> Result<UniqueId, String> {
    let stored = state.store.read(&key.store_key(), state.timeout);
    let stored = stored.map_err(|error| error.to_string())?;
    let len = stored.len();
    let id = stored.try_into().map(UniqueId);
    id.map_err(|_| {
        format!(
            "the unique id has {len} bytes, expected {}; do all ranks run the same build of this program?",
            size_of::<UniqueId>()
        )
    })
}
