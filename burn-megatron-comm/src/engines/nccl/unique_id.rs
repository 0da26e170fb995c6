//! How the ranks of a communicator get its unique id.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread;

use super::api::UniqueId;
use super::communicator::CommKey;
use super::engine_state::{EngineState, WorkerCommand};

/// Publishes or reads the unique id of `key` on a thread of its own, which then passes it to the worker: reading
/// may take long.
///
/// # Errors
/// If no thread can be started.
pub(super) fn find(
    key: CommKey,
    publishes: bool,
    state: &Arc<EngineState>,
    worker: &Sender<WorkerCommand>,
) -> Result<(), String> {
    let (state, worker) = (state.clone(), worker.clone());
    let find = move || {
        let id = if publishes {
            publish(key, &state)
        } else {
            read(key, &state)
        };
        // The worker may have ended.
        let _ = worker.send(WorkerCommand::Id { key, id });
    };
    let builder = thread::Builder::new().name("nccl-id".into());
    let started = builder.spawn(find);
    started
        .map(drop)
        .map_err(|error| format!("cannot start a thread: {error}"))
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
