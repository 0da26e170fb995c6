//! Opening communicators.

use super::super::api::{NO_COLOUR, UniqueId};
use super::super::buffers::empty_result;
use super::super::call::NcclCall;
use super::super::communicator::{CommKey, CommState, NcclCommunicator, comm_slot};
use super::super::engine_state::Split;
use super::super::library::Progress;
use super::super::plan::{CommScope, RECEIVER, SENDER};
use super::super::{error, unique_id};
use super::{Arc, NcclWorker, ResultSlot};

impl NcclWorker {
    /// Opens a communicator whose unique id is in the store, or is published there.
    pub(super) fn open(
        &mut self,
        key: CommKey,
        rank: usize,
        size: usize,
        reply: Option<Arc<ResultSlot>>,
    ) {
        let stream = match key {
            CommKey::Group(_) => Ok(self.collective_stream),
            CommKey::Message { .. } => self.shared.driver.create_stream(),
        };
        let state = match &stream {
            Err(reason) => CommState::Failed(reason.clone()),
            Ok(_) => match unique_id::find(key, rank == 0, &self.shared, &self.self_sender) {
                Ok(()) => CommState::AwaitingId { rank, size },
                Err(reason) => CommState::Failed(reason),
            },
        };
        let stream = stream.unwrap_or(self.collective_stream);
        let communicator = NcclCommunicator::new(state, stream, reply);
        self.communicators.insert(key, communicator);
    }

    pub(super) fn init(&mut self, key: CommKey, id: Result<UniqueId, String>) {
        let Some(communicator) = self.communicators.get_mut(&key) else {
            return;
        };
        let CommState::AwaitingId { rank, size } = communicator.state else {
            return;
        };
        let library = &self.shared.library;
        communicator.state = match id.and_then(|id| library.init(&id, rank, size)) {
            Ok(comm) => {
                self.shared.comms.add(comm);
                CommState::Initializing(comm)
            }
            Err(reason) => CommState::Failed(reason),
        };
    }

    pub(super) fn advance_communicators(&mut self) {
        let (library, comms) = (&self.shared.library, &self.shared.comms);
        for (key, communicator) in &mut self.communicators {
            communicator.advance(library, comms);
            let result = match &communicator.state {
                CommState::Ready(_) => Ok(empty_result()),
                CommState::Failed(reason) => {
                    let error = error(format!("{}: {reason}", key.store_key()));
                    self.shared.fail(&error);
                    Err(error)
                }
                _ => continue,
            };
            if let Some(ready) = communicator.ready.take() {
                ready.fulfil(result);
            }
        }
        // The slot is kept until the library has written it.
        self.empty_splits.retain(|(parent, _slot, reply)| {
            let result = match library.poll(*parent) {
                Ok(Progress::Running) => return true,
                Ok(Progress::Done) => Ok(empty_result()),
                Err(reason) => Err(error(reason)),
            };
            reply.fulfil(result);
            false
        });
    }

    /// Whether the communicator is ready; that of messages is opened if it does not exist.
    ///
    /// # Errors
    /// Why it never will be.
    pub(super) fn communicator_ready(
        &mut self,
        key: CommKey,
        call: Option<&NcclCall>,
    ) -> Result<bool, String> {
        match (self.communicators.get(&key).map(|comm| &comm.state), call) {
            (Some(CommState::Ready(_)), _) => Ok(true),
            (Some(CommState::Failed(reason)), _) => Err(reason.clone()),
            (Some(_), _) => Ok(false),
            (None, Some(call)) if matches!(call.plan.scope, CommScope::Message { .. }) => {
                let rank = match call.plan.input {
                    0 => RECEIVER,
                    _ => SENDER,
                };
                self.open(key, rank, 2, None);
                Ok(false)
            }
            (None, _) => Err(format!("there is no communicator {}", key.store_key())),
        }
    }

    pub(super) fn split(&mut self, split: Split) {
        let Some(parent) = self
            .communicators
            .get(&split.parent)
            .and_then(NcclCommunicator::comm)
        else {
            let missing = format!("there is no communicator {}", split.parent.store_key());
            return split.reply.fulfil(Err(error(missing)));
        };
        let slot = comm_slot();
        let (colour, key) = match split.part {
            None => (NO_COLOUR, 0),
            Some((_, part, index)) => (part as _, index as _),
        };
        let started = self.shared.library.split(parent, colour, key, &slot);
        match (started, split.part) {
            (Err(reason), _) => {
                let error = error(reason);
                self.shared.fail(&error);
                split.reply.fulfil(Err(error));
            }
            (Ok(()), None) => self.empty_splits.push((parent, slot, split.reply)),
            (Ok(()), Some((part, ..))) => {
                let state = CommState::Splitting { parent, slot };
                let communicator =
                    NcclCommunicator::new(state, self.collective_stream, Some(split.reply));
                self.communicators.insert(part, communicator);
            }
        }
    }
}
