//! The creation of the communicators that calls require.

use super::super::api::NO_COLOUR;
use super::super::buffers::empty_result;
use super::super::communicator::{CommKey, CommState, NcclCommunicator};
use super::super::driver::{Priority, Stream};
use super::super::engine_state::Split;
use super::super::error;
use super::super::library::{Comm, Progress};
use super::super::opening::{self, Opening};
use super::{Arc, NcclWorker, ResultSlot, WorkItem};
use crate::nccl_config::NcclGroup;

impl NcclWorker {
    /// Starts to create the missing communicators of waiting calls. The communicators of calls that are launched
    /// together are created together. Other communicators are created separately, so that a communicator that waits for
    /// other ranks does not block another communicator.
    pub(super) fn open_missing(&mut self) {
        if self.shared.first_error().is_some() {
            return;
        }
        let mut missing: Vec<Vec<Opening>> = vec![];
        for work in &self.waiting {
            let WorkItem::Calls(calls) = work else {
                continue;
            };
            let mut of_work: Vec<Opening> = vec![];
            for call in calls {
                let is_new = !self.communicators.contains_key(&call.key)
                    && !missing
                        .iter()
                        .chain([&of_work])
                        .flatten()
                        .any(|other| other.key == call.key);
                if is_new {
                    of_work.push(call.opening());
                }
            }
            if !of_work.is_empty() {
                missing.push(of_work);
            }
        }
        for openings in missing {
            self.open(openings, None);
        }
    }

    /// Starts to create several communicators together.
    pub(super) fn open(&mut self, openings: Vec<Opening>, reply: Option<Arc<ResultSlot>>) {
        let streams = openings.iter().map(|opening| self.stream_of(opening));
        let streams: Result<Vec<_>, String> = streams.collect();
        let begun = streams.and_then(|streams| {
            let with_streams = openings.iter().copied().zip(streams.clone()).collect();
            opening::begin(with_streams, &self.shared, &self.self_sender).map(|()| streams)
        });
        for (at, opening) in openings.iter().enumerate() {
            let (state, stream) = match &begun {
                Ok(streams) => (CommState::Opening, streams[at]),
                Err(reason) => (CommState::Failed(reason.clone()), self.collective_stream),
            };
            let communicator = NcclCommunicator::new(state, stream, reply.clone());
            self.communicators.insert(opening.key, communicator);
        }
    }

    /// Returns the stream for the calls of a communicator. For collectives, this is the collective stream of the group.
    /// For messages, this is a new stream.
    fn stream_of(&self, opening: &Opening) -> Result<Stream, String> {
        match opening.key {
            CommKey::Group(_) => Ok(self.collective_stream(opening.group)),
            CommKey::Message { .. } => {
                let config = self.shared.config.group(NcclGroup::Messages);
                self.shared
                    .driver
                    .create_stream(match config.high_priority_stream {
                        Some(true) => Priority::High,
                        _ => Priority::Normal,
                    })
            }
        }
    }

    fn collective_stream(&self, group: NcclGroup) -> Stream {
        match self.shared.streams.priority(group) {
            Priority::Normal => self.collective_stream,
            Priority::High => self.high_priority_stream,
        }
    }

    pub(super) fn opened(&mut self, key: CommKey, result: Result<Comm, String>) {
        if let Some(communicator) = self.communicators.get_mut(&key) {
            communicator.state = match result {
                Ok(comm) => CommState::Ready(comm),
                Err(reason) => CommState::Failed(reason),
            };
        }
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
        // The slot is kept until the library has written to it.
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

    /// Returns whether the communicator is ready.
    ///
    /// # Errors
    /// The reason why the communicator cannot become ready.
    pub(super) fn communicator_ready(&self, key: CommKey) -> Result<bool, String> {
        match self.communicators.get(&key).map(|comm| &comm.state) {
            Some(CommState::Ready(_)) => Ok(true),
            Some(CommState::Failed(reason)) => Err(reason.clone()),
            Some(_) => Ok(false),
            None => Err(format!("there is no communicator {}", key.store_key())),
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
        let slot = opening::slot();
        let (colour, key) = match split.part {
            None => (NO_COLOUR, 0),
            Some((_, part, index)) => (part as _, index as _),
        };
        let config = self.shared.config.group(split.group);
        let library = &self.shared.library;
        let started = library.split(parent, colour, key, config, &slot);
        match (started, split.part) {
            (Err(reason), _) => {
                let error = error(reason);
                self.shared.fail(&error);
                split.reply.fulfil(Err(error));
            }
            (Ok(()), None) => self.empty_splits.push((parent, slot, split.reply)),
            (Ok(()), Some((part, ..))) => {
                let state = CommState::Splitting { parent, slot };
                let stream = self.collective_stream(split.group);
                let communicator = NcclCommunicator::new(state, stream, Some(split.reply));
                self.communicators.insert(part, communicator);
            }
        }
    }
}
