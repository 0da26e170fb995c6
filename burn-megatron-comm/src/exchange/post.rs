//! The desk at which this rank gives messages to the wire and gets word of them.

use std::collections::{HashMap, HashSet};

use super::header::{Carriage, Header, INLINE, Note};
use super::memory::{Incoming, Landing, Outgoing};
use super::messages::Letter;
use super::wire::{TAGS, Tag, Ticket, Wire};
use crate::buffer::{Buffer, DType};
use crate::error::CommError;
use crate::pool::{BufferPool, Lent};
use crate::process::GroupId;

/// The number of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    pub group: GroupId,
    pub sequence: u64,
}

/// What a payload under way is for.
pub enum Purpose {
    /// A payload of this rank, of a collective if there is a key.
    Given {
        to: usize,
        tag: Tag,
        call: Option<Key>,
    },
    /// What the member with that index gives to a collective.
    Taken { call: Key, index: usize },
    /// A message from one rank to this one.
    Letter(Letter),
    /// A payload that nobody wants.
    Discarded,
}

/// What goes with a header.
pub enum Body {
    Payload(Option<Outgoing>),
    Words(Vec<u8>),
    Refusal(Vec<u8>),
}

/// The numbers of the payloads that are under way to one rank.
#[derive(Default)]
struct Tags {
    last: Tag,
    used: HashSet<Tag>,
}

pub struct Post<W> {
    pub wire: W,
    pub engine: &'static str,
    purposes: HashMap<Ticket, Purpose>,
    tags: Vec<Tags>,
    tickets: u64,
}

impl Tags {
    /// A number that no payload under way has.
    fn next(&mut self) -> Option<Tag> {
        if self.used.len() == usize::from(TAGS) {
            return None;
        }
        loop {
            self.last = self.last % TAGS + 1;
            if self.used.insert(self.last) {
                return Some(self.last);
            }
        }
    }
}

impl<W: Wire> Post<W> {
    pub fn new(wire: W, engine: &'static str) -> Self {
        let tags = (0..wire.size()).map(|_| Tags::default()).collect();
        Self {
            wire,
            engine,
            purposes: HashMap::new(),
            tags,
            tickets: 0,
        }
    }

    /// Whether payloads are under way.
    pub fn is_moving(&self) -> bool {
        !self.purposes.is_empty()
    }

    /// Whether every message that was given or asked for is complete.
    pub fn is_idle(&self) -> bool {
        !self.is_moving() && self.wire.is_idle()
    }

    /// An error of this engine.
    pub fn error(&self, message: String) -> CommError {
        CommError::Engine {
            engine: self.engine.to_owned(),
            message,
        }
    }

    /// Sends a note with its payload; whether the payload travels by itself.
    pub fn give(
        &mut self,
        to: usize,
        mut header: Header,
        body: Body,
        call: Option<Key>,
    ) -> Result<bool, CommError> {
        let (carriage, body, payload) = match body {
            Body::Words(words) => (Carriage::Nothing, words, None),
            Body::Refusal(words) => (Carriage::Refused, words, None),
            Body::Payload(None) => (Carriage::Nothing, Vec::new(), None),
            Body::Payload(Some(payload)) if payload.bytes().len() <= INLINE => {
                (Carriage::Inline, payload.bytes().to_vec(), None)
            }
            Body::Payload(Some(payload)) => {
                let tag = self.tags[to].next().ok_or_else(|| {
                    self.error(format!(
                        "{TAGS} messages are on their way to rank {to}, and no more can be; it takes \
                         none of them"
                    ))
                })?;
                let bytes = payload.bytes().len() as u64;
                (
                    Carriage::Tagged { tag, bytes },
                    Vec::new(),
                    Some((tag, payload)),
                )
            }
        };
        header.carriage = carriage;
        self.wire.note(to, Note { header, body }.encode())?;
        match payload {
            None => Ok(false),
            Some((tag, payload)) => {
                let ticket = self.ticket(Purpose::Given { to, tag, call });
                self.wire.send(to, tag, payload, ticket).map(|()| true)
            }
        }
    }

    /// Fetches a payload to its place.
    pub fn take(
        &mut self,
        from: usize,
        tag: Tag,
        place: Incoming,
        purpose: Purpose,
    ) -> Result<(), CommError> {
        let ticket = self.ticket(purpose);
        self.wire.receive(from, tag, place, ticket)
    }

    /// Fetches the payload of a note and throws it away, so that its sender is not held up.
    pub fn discard(&mut self, from: usize, carriage: Carriage) -> Result<(), CommError> {
        let Carriage::Tagged { tag, bytes } = carriage else {
            return Ok(());
        };
        let len = bytes as usize;
        let nowhere = Lent::new(Buffer::zeros(DType::U8, len), &BufferPool::new().into());
        match Landing::at(nowhere, 0..len) {
            (_, None) => Ok(()),
            (_, Some(place)) => self.take(from, tag, place, Purpose::Discarded),
        }
    }

    /// What a message was for that is complete.
    pub fn done(&mut self, ticket: Ticket) -> Option<Purpose> {
        let purpose = self.purposes.remove(&ticket);
        if let Some(Purpose::Given { to, tag, .. }) = &purpose {
            self.tags[*to].used.remove(tag);
        }
        purpose
    }

    /// Ends the receives whose messages are under way with an error.
    pub fn fail_letters(&self, error: &CommError) {
        for purpose in self.purposes.values() {
            if let Purpose::Letter(letter) = purpose {
                letter.fail(error);
            }
        }
    }

    fn ticket(&mut self, purpose: Purpose) -> Ticket {
        self.tickets += 1;
        self.purposes.insert(Ticket(self.tickets), purpose);
        Ticket(self.tickets)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_is_used_again_when_its_payload_is_gone() {
        let mut tags = Tags::default();
        assert_eq!((tags.next(), tags.next()), (Some(1), Some(2)));
        tags.used.remove(&1);
        // The first stays under way while all others come and go.
        for wanted in 3..=TAGS {
            assert_eq!(tags.next(), Some(wanted));
            tags.used.remove(&wanted);
        }
        assert_eq!((tags.next(), tags.next()), (Some(1), Some(3)));
    }

    #[test]
    fn tags_run_out() {
        let mut tags = Tags::default();
        let taken = (0..TAGS).filter_map(|_| tags.next()).count();
        assert_eq!((taken, tags.next()), (usize::from(TAGS), None));
        tags.used.remove(&77);
        assert_eq!(tags.next(), Some(77));
    }
}
