//! How the ranks of a communicator learn its unique id.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread;

use super::api::UniqueId;
use super::lane::Key;
use super::shared::{Command, Shared};

/// Has the id of `key` posted, or read, on a thread of its own, which then tells the worker: an id may be
/// long in coming.
///
/// # Errors
/// That no thread could be started.
pub(super) fn find_id(
    key: Key,
    posts: bool,
    shared: &Arc<Shared>,
    worker: &Sender<Command>,
) -> Result<(), String> {
    let (shared, worker) = (shared.clone(), worker.clone());
    let find = move || {
        let id = match posts {
            true => post(key, &shared),
            false => read(key, &shared),
        };
        // The worker may have ended meanwhile.
        let _ = worker.send(Command::Id { key, id });
    };
    let builder = thread::Builder::new().name("nccl-id".into());
    let started = builder.spawn(find);
    started
        .map(drop)
        .map_err(|error| format!("a thread cannot be started: {error}"))
}

fn post(key: Key, shared: &Shared) -> Result<UniqueId, String> {
    let id = shared.library.unique_id()?;
    let posted = shared.bulletin.post(&key.posted_as(), &id.0);
    posted.map(|()| id).map_err(|error| error.to_string())
}

fn read(key: Key, shared: &Shared) -> Result<UniqueId, String> {
    let posted = shared.bulletin.read(&key.posted_as(), shared.patience);
    let posted = posted.map_err(|error| error.to_string())?;
    let len = posted.len();
    let id = posted.try_into().map(UniqueId);
    id.map_err(|_| {
        format!(
            "the id of NCCL that was posted has {len} bytes, not {}; do all ranks run one program?",
            size_of::<UniqueId>()
        )
    })
}
