//! How communicators begin.

use super::super::api::{NO_COLOUR, UniqueId};
use super::super::item::Item;
use super::super::lane::{Key, Lane, State, place};
use super::super::library::Progress;
use super::super::memory::nothing;
use super::super::plan::{RECEIVER, SENDER, Way};
use super::super::shared::Split;
use super::super::{error, opening};
use super::{Arc, Slot, Worker};

impl Worker {
    /// Begins a communicator whose id is on the bulletin, or is put there.
    pub(super) fn open(&mut self, key: Key, rank: usize, size: usize, told: Option<Arc<Slot>>) {
        let stream = match key {
            Key::Group(_) => Ok(self.collectives),
            Key::Message { .. } => self.shared.driver.stream(),
        };
        let state = match &stream {
            Err(reason) => State::Broken(reason.clone()),
            Ok(_) => match opening::find_id(key, rank == 0, &self.shared, &self.own) {
                Ok(()) => State::Id { rank, size },
                Err(reason) => State::Broken(reason),
            },
        };
        let lane = Lane::new(state, stream.unwrap_or(self.collectives), told);
        self.lanes.insert(key, lane);
    }

    pub(super) fn init(&mut self, key: Key, id: Result<UniqueId, String>) {
        let Some(lane) = self.lanes.get_mut(&key) else {
            return;
        };
        let State::Id { rank, size } = lane.state else {
            return;
        };
        let library = &self.shared.library;
        lane.state = match id.and_then(|id| library.init(&id, rank, size)) {
            Ok(comm) => {
                self.shared.comms.add(comm);
                State::Init(comm)
            }
            Err(reason) => State::Broken(reason),
        };
    }

    pub(super) fn advance_lanes(&mut self) {
        let (library, comms) = (&self.shared.library, &self.shared.comms);
        for (key, lane) in &mut self.lanes {
            lane.advance(library, comms);
            let result = match &lane.state {
                State::Ready(_) => Ok(nothing()),
                State::Broken(reason) => {
                    let error = error(format!("{}: {reason}", key.posted_as()));
                    self.shared.fail(&error);
                    Err(error)
                }
                _ => continue,
            };
            if let Some(told) = lane.told.take() {
                told.fulfil(result);
            }
        }
        // The place is kept until the library has done with it.
        self.leaving.retain(|(parent, _place, told)| {
            let result = match library.poll(*parent) {
                Ok(Progress::Running) => return true,
                Ok(Progress::Done) => Ok(nothing()),
                Err(reason) => Err(error(reason)),
            };
            told.fulfil(result);
            false
        });
    }

    /// Whether the communicator is there; that of messages is begun if it is not.
    ///
    /// # Errors
    /// Why it will never be.
    pub(super) fn lane_ready(&mut self, key: Key, item: Option<&Item>) -> Result<bool, String> {
        match (self.lanes.get(&key).map(|lane| &lane.state), item) {
            (Some(State::Ready(_)), _) => Ok(true),
            (Some(State::Broken(reason)), _) => Err(reason.clone()),
            (Some(_), _) => Ok(false),
            (None, Some(item)) if matches!(item.plan.way, Way::Message { .. }) => {
                let rank = match item.plan.input {
                    0 => RECEIVER,
                    _ => SENDER,
                };
                self.open(key, rank, 2, None);
                Ok(false)
            }
            (None, _) => Err(format!("there is no communicator {}", key.posted_as())),
        }
    }

    pub(super) fn split(&mut self, split: Split) {
        let Some(parent) = self.lanes.get(&split.parent).and_then(Lane::comm) else {
            let missing = format!("there is no communicator {}", split.parent.posted_as());
            return split.told.fulfil(Err(error(missing)));
        };
        let place = place();
        let (colour, key) = match split.part {
            None => (NO_COLOUR, 0),
            Some((_, part, index)) => (part as _, index as _),
        };
        let begun = self.shared.library.split(parent, colour, key, &place);
        match (begun, split.part) {
            (Err(reason), _) => {
                let error = error(reason);
                self.shared.fail(&error);
                split.told.fulfil(Err(error));
            }
            (Ok(()), None) => self.leaving.push((parent, place, split.told)),
            (Ok(()), Some((part, ..))) => {
                let state = State::Split { parent, place };
                let lane = Lane::new(state, self.collectives, Some(split.told));
                self.lanes.insert(part, lane);
            }
        }
    }
}
