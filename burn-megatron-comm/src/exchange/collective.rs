//! One collective under way: who has come, and what of this round has arrived.

use std::sync::Arc;

use super::agreement::{read_refusal, words, write_refusal};
use super::header::{Carriage, Header, Note};
use super::memory::{Incoming, Outgoing};
use super::plan::{Outcome, Round};
use super::post::{Body, Key, Post, Purpose};
use super::wire::Wire;
use crate::call::Signature;
use crate::communicator::Group;
use crate::error::CommError;
use crate::process::Slot;

/// How far the message of one member in this round is.
enum Arrival {
    /// Nothing has come; where its elements will lie, if it gives any.
    Awaited(Option<Incoming>),
    /// Its note has come, its payload is on the way.
    Coming,
    Here,
}

pub struct Collective {
    pub slot: Arc<Slot>,
    group: Arc<Group>,
    signature: Arc<Signature>,
    key: Key,
    round: u8,
    arrivals: Vec<Arrival>,
    gives: Vec<Option<Outgoing>>,
    /// Payloads of this rank that are on their way.
    giving: usize,
    then: Option<Box<dyn FnOnce() -> Outcome>>,
    /// Whether the members disagree. The call then stays until all have come, so that what they send finds
    /// it.
    failed: bool,
}

impl Collective {
    pub fn new(
        key: Key,
        group: Arc<Group>,
        signature: Arc<Signature>,
        slot: Arc<Slot>,
        first: Round,
    ) -> Self {
        let mut collective = Self {
            slot,
            group,
            signature,
            key,
            round: 0,
            arrivals: Vec::new(),
            gives: Vec::new(),
            giving: 0,
            then: None,
            failed: false,
        };
        collective.plan(first);
        collective
    }

    fn plan(&mut self, round: Round) {
        let awaited = |(index, place)| match index == self.group.index() {
            true => Arrival::Here,
            false => Arrival::Awaited(place),
        };
        self.arrivals = round.takes.into_iter().enumerate().map(awaited).collect();
        self.gives = round.gives;
        self.then = Some(round.then);
    }

    /// Goes on to the next round.
    pub fn follow(&mut self, round: Round) {
        self.round += 1;
        self.plan(round);
    }

    pub fn round(&self) -> u8 {
        self.round
    }

    /// The index of a world rank in the group.
    pub fn index_of(&self, rank: usize) -> Option<usize> {
        self.group.ranks().iter().position(|member| *member == rank)
    }

    /// The other members with their world ranks, beginning behind this one, so that not all send to the
    /// first one first.
    pub fn others(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (group, size) = (Arc::clone(&self.group), self.group.size());
        (1..size).map(move |step| {
            let index = (group.index() + step) % size;
            (index, group.ranks()[index])
        })
    }

    /// The indices of the members whose part in this round has not come.
    pub fn missing(&self) -> Vec<usize> {
        let absent = |(index, arrival): (usize, &Arrival)| {
            (!matches!(arrival, Arrival::Here)).then_some(index)
        };
        self.arrivals
            .iter()
            .enumerate()
            .filter_map(absent)
            .collect()
    }

    /// Gives the slot the error, once.
    fn fail(&mut self, error: CommError) {
        if !self.failed {
            self.failed = true;
            self.slot.fulfil(Err(error));
            // What would have been made of the round is dropped with its memory, but for what is under way.
            self.then = None;
        }
    }

    /// Compares this rank's part with one that came before it; the error if they disagree.
    pub fn compare_early(&self, index: usize, note: &Note) -> Option<CommError> {
        match note.header.carriage {
            Carriage::Refused => read_refusal(&note.body, &self.group),
            _ => note.mismatch(index, &self.signature, &self.group, true),
        }
    }

    /// Tells all others that this rank takes no part in the call and why.
    pub fn refuse<W: Wire>(
        &mut self,
        post: &mut Post<W>,
        error: CommError,
    ) -> Result<(), CommError> {
        let refusal = write_refusal(&error);
        self.fail(error);
        for (index, rank) in self.others() {
            let body = Body::Refusal(refusal.clone());
            post.give(rank, self.header(index), body, None)?;
        }
        Ok(())
    }

    /// Sends this rank's part in the round.
    pub fn give<W: Wire>(&mut self, post: &mut Post<W>) -> Result<(), CommError> {
        let words = words(&self.signature, &self.group);
        for (index, rank) in self.others() {
            let body = match self.gives[index].take() {
                None => Body::Words(words.clone()),
                payload => Body::Payload(payload),
            };
            let header = self.header(index);
            if post.give(rank, header, body, Some(self.key))? {
                self.giving += 1;
            }
        }
        Ok(())
    }

    fn header(&self, reader: usize) -> Header {
        let Key { group, sequence } = self.key;
        Header::of(&self.signature, group, sequence, self.round, reader)
    }

    /// Takes the note of a member in this round.
    pub fn hear<W: Wire>(
        &mut self,
        post: &mut Post<W>,
        index: usize,
        note: Note,
        came_first: bool,
    ) -> Result<(), CommError> {
        let from = self.group.ranks()[index];
        let arrival = std::mem::replace(&mut self.arrivals[index], Arrival::Here);
        let Arrival::Awaited(place) = arrival else {
            return Err(post.error(format!(
                "rank {from} has come twice to call {} over {}",
                self.key.sequence, self.group
            )));
        };
        if let Carriage::Refused = note.header.carriage {
            match read_refusal(&note.body, &self.group) {
                Some(error) => self.fail(error),
                None => return Err(self.unfit(post, index, 0, &note)),
            }
        } else if let Some(error) = note.mismatch(index, &self.signature, &self.group, came_first) {
            self.fail(error);
        }
        if self.failed {
            return post.discard(from, note.header.carriage);
        }
        match (note.header.carriage, place) {
            (Carriage::Nothing, None) => Ok(()),
            (Carriage::Inline, Some(place)) if place.len() == note.body.len() => {
                place.fill(&note.body);
                Ok(())
            }
            (Carriage::Tagged { tag, bytes }, Some(place)) if place.len() as u64 == bytes => {
                self.arrivals[index] = Arrival::Coming;
                let call = self.key;
                post.take(from, tag, place, Purpose::Taken { call, index })
            }
            (_, place) => Err(self.unfit(post, index, place.map_or(0, |place| place.len()), &note)),
        }
    }

    /// Ranks that agree send what the others expect, unless they run different programs.
    fn unfit<W: Wire>(&self, post: &Post<W>, index: usize, bytes: usize, note: &Note) -> CommError {
        post.error(format!(
            "rank {} sends {:?} with {} bytes in round {} of call {} {} over {}, where {bytes} bytes are \
             expected; do all ranks run the same build of this program?",
            self.group.ranks()[index],
            note.header.carriage,
            note.body.len(),
            self.round,
            self.key.sequence,
            self.signature.describe(&self.group),
            self.group
        ))
    }

    /// The payload of a member has come.
    pub fn taken(&mut self, index: usize) {
        self.arrivals[index] = Arrival::Here;
    }

    /// A payload of this rank has been taken.
    pub fn given(&mut self) {
        self.giving -= 1;
    }

    /// What follows, if this round is over; `None` in it if the members disagree.
    pub fn next(&mut self) -> Option<Option<Outcome>> {
        let here = |arrival: &Arrival| matches!(arrival, Arrival::Here);
        let over = self.giving == 0 && self.arrivals.iter().all(here);
        over.then(|| self.then.take().map(|then| then()))
    }
}
