//! All that one rank has under way, and what happens to it when a message comes.

use std::collections::{HashMap, VecDeque};
use std::mem;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Weak};

use super::collective::Collective;
use super::header::{INLINE, Kind, Note};
use super::messages::{self, deliver};
use super::plan::{Outcome, first_round};
use super::post::{Key, Post, Purpose};
use super::wire::{Event, Wire};
use crate::call::{Call, Operation};
use crate::error::CommError;
use crate::pool::{BufferPool, Lent};
use crate::process::{Job, Slot};

/// A note that came before its call, by what it is about and who sent it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Early {
    Collective { call: Key, round: u8, from: usize },
    Message { number: Key, from: usize },
}

impl Early {
    fn round(call: Key, round: u8, from: usize) -> Self {
        Early::Collective { call, round, from }
    }
}

/// What there is to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activity {
    /// Nothing.
    None,
    /// Others have not come, or notes have not left.
    Waiting,
    /// Payloads are under way.
    Moving,
}

pub type Reply<T> = Sender<Result<T, CommError>>;

/// What rank 0 tells all, and who asks for it.
#[derive(Default)]
struct Shared {
    told: VecDeque<Vec<u8>>,
    asked: VecDeque<Reply<Vec<u8>>>,
}

/// Hands a collective the notes of this round that came before it.
fn hear_early<W: Wire>(
    post: &mut Post<W>,
    notes: &mut HashMap<Early, Note>,
    call: Key,
    collective: &mut Collective,
) -> Result<(), CommError> {
    let round = collective.round();
    for (index, from) in collective.others() {
        if let Some(note) = notes.remove(&Early::round(call, round, from)) {
            collective.hear(post, index, note, true)?;
        }
    }
    Ok(())
}

fn fail(slot: &Weak<Slot>, error: &CommError) {
    if let Some(slot) = slot.upgrade() {
        slot.fulfil(Err(error.clone()));
    }
}

/// The collectives and messages of one rank, over its wire.
pub struct RankState<W> {
    post: Post<W>,
    pool: Arc<BufferPool>,
    collectives: HashMap<Key, Collective>,
    /// Receives whose message has not come, by its number and its sender.
    receives: HashMap<(Key, usize), Job>,
    early: HashMap<Early, Note>,
    shared: Shared,
    events: Vec<Event>,
    closing: bool,
    /// The ranks that have sent their last note.
    closed: Vec<usize>,
}

impl<W: Wire> RankState<W> {
    pub fn new(wire: W, engine: &'static str, pool: Arc<BufferPool>) -> Self {
        Self {
            post: Post::new(wire, engine),
            pool,
            collectives: HashMap::new(),
            receives: HashMap::new(),
            early: HashMap::new(),
            shared: Shared::default(),
            events: Vec::new(),
            closing: false,
            closed: Vec::new(),
        }
    }

    /// Starts a call. If the wire fails at it, its slot says so too.
    pub fn start(&mut self, job: Job) -> Result<(), CommError> {
        // Weak, so that a slot that nobody holds is still seen to be one.
        let slot = Arc::downgrade(&job.slot);
        self.begin(job).inspect_err(|error| fail(&slot, error))
    }

    fn begin(&mut self, job: Job) -> Result<(), CommError> {
        let key = Key {
            group: job.group_id,
            sequence: job.sequence,
        };
        match job.signature.operation {
            Operation::Call(Call::Send { .. }) => messages::send(&mut self.post, job, &self.pool),
            Operation::Call(Call::Receive { from, .. }) => {
                let from = job.group.ranks()[from];
                match self.early.remove(&Early::Message { number: key, from }) {
                    Some(note) => messages::receive(&mut self.post, job, note, &self.pool),
                    None => {
                        self.receives.insert((key, from), job);
                        Ok(())
                    }
                }
            }
            _ => self.start_collective(key, job),
        }
    }

    fn start_collective(&mut self, key: Key, job: Job) -> Result<(), CommError> {
        let input = Lent::new(job.input, &self.pool);
        let first = first_round(&job.signature, &job.group, input, &self.pool);
        let mut collective = Collective::new(key, job.group, job.signature, job.slot, first);
        // A call that others have refused, or that does not fit theirs, sends no payload.
        let refused = collective.others().find_map(|(index, from)| {
            let early = self.early.get(&Early::round(key, 0, from))?;
            collective.compare_early(index, early)
        });
        match refused {
            Some(error) => collective.refuse(&mut self.post, error)?,
            None => collective.give(&mut self.post)?,
        }
        hear_early(&mut self.post, &mut self.early, key, &mut collective)?;
        self.collectives.insert(key, collective);
        self.settle(key)
    }

    /// Goes on with a collective as far as it gets.
    fn settle(&mut self, key: Key) -> Result<(), CommError> {
        while let Some(collective) = self.collectives.get_mut(&key)
            && let Some(outcome) = collective.next()
        {
            match outcome {
                Some(Outcome::Again(round)) => {
                    collective.follow(round);
                    collective.give(&mut self.post)?;
                    hear_early(&mut self.post, &mut self.early, key, collective)?;
                }
                // Without a result, the members disagreed, and now all have come.
                done => {
                    let over = self.collectives.remove(&key);
                    if let (Some(over), Some(Outcome::Done(result))) = (over, done) {
                        deliver(over.slot, result, &self.pool);
                    }
                }
            }
        }
        Ok(())
    }

    /// Looks at the wire; whether anything has happened.
    pub fn poll(&mut self) -> Result<bool, CommError> {
        let mut events = mem::take(&mut self.events);
        self.post.wire.poll(&mut events)?;
        let stirred = !events.is_empty();
        for event in events.drain(..) {
            match event {
                Event::Note { from, bytes } => {
                    let note = Note::decode(bytes, self.post.engine, from)?;
                    self.hear(from, note)?;
                }
                Event::Done(ticket) => match self.post.done(ticket) {
                    None | Some(Purpose::Discarded) => {}
                    Some(Purpose::Letter(letter)) => letter.deliver(&self.pool),
                    Some(Purpose::Given { call, .. }) => {
                        self.change(call, |collective| collective.given())?;
                    }
                    Some(Purpose::Taken { call, index }) => {
                        self.change(Some(call), |collective| collective.taken(index))?;
                    }
                },
            }
        }
        self.events = events;
        Ok(stirred)
    }

    fn change(
        &mut self,
        key: Option<Key>,
        change: impl FnOnce(&mut Collective),
    ) -> Result<(), CommError> {
        match key.and_then(|key| Some((key, self.collectives.get_mut(&key)?))) {
            None => Ok(()),
            Some((key, collective)) => {
                change(collective);
                self.settle(key)
            }
        }
    }

    fn hear(&mut self, from: usize, note: Note) -> Result<(), CommError> {
        let key = Key {
            group: note.header.group,
            sequence: note.header.sequence,
        };
        match note.header.kind {
            Kind::Share => {
                self.shared.told.push_back(note.body);
                self.answer_shared();
                Ok(())
            }
            Kind::Close => {
                self.closed.push(from);
                Ok(())
            }
            Kind::Send { .. } => match self.receives.remove(&(key, from)) {
                Some(job) => {
                    let slot = Arc::downgrade(&job.slot);
                    messages::receive(&mut self.post, job, note, &self.pool)
                        .inspect_err(|error| fail(&slot, error))
                }
                None => {
                    let early = Early::Message { number: key, from };
                    self.keep_early(early, note)
                }
            },
            _ => self.hear_collective(key, from, note),
        }
    }

    fn hear_collective(&mut self, key: Key, from: usize, note: Note) -> Result<(), CommError> {
        let round = note.header.round;
        match self.collectives.get_mut(&key) {
            Some(collective) if collective.round() == round => {
                let index = collective.index_of(from).ok_or_else(|| {
                    self.post.error(format!(
                        "rank {from} sends to a group that it is not in, at its call {}",
                        key.sequence
                    ))
                })?;
                collective.hear(&mut self.post, index, note, false)?;
                self.settle(key)
            }
            _ => self.keep_early(Early::round(key, round, from), note),
        }
    }

    fn keep_early(&mut self, early: Early, note: Note) -> Result<(), CommError> {
        match self.early.insert(early, note) {
            None => Ok(()),
            Some(_) => Err(self
                .post
                .error(format!("a rank has sent the same note twice: {early:?}"))),
        }
    }

    /// The ranks that have not said that they are at their end.
    pub fn unclosed(&self) -> Vec<usize> {
        let own = self.post.wire.rank();
        let open = |rank: &usize| *rank != own && !self.closed.contains(rank);
        (0..self.post.wire.size()).filter(open).collect()
    }

    /// The members whose part in a collective has not come; `None` if it is not under way.
    pub fn missing(&self, key: Key) -> Option<Vec<usize>> {
        self.collectives.get(&key).map(Collective::missing)
    }

    /// On rank 0, tells all others; on these, asks for what it tells.
    pub fn share(&mut self, told: Option<Vec<u8>>, reply: Reply<Vec<u8>>) -> Result<(), CommError> {
        match told {
            None => {
                self.shared.asked.push_back(reply);
                self.answer_shared();
            }
            Some(told) if told.len() > INLINE => {
                let error = self.post.error(format!(
                    "{} bytes are too many to share at the start; at most {INLINE} would fit",
                    told.len()
                ));
                let _ = reply.send(Err(error));
            }
            Some(told) => {
                let note = Note::plain(Kind::Share, told);
                self.note_all(&note)?;
                // Whoever asked may have gone.
                let _ = reply.send(Ok(note.body));
            }
        }
        Ok(())
    }

    fn note_all(&mut self, note: &Note) -> Result<(), CommError> {
        let own = self.post.wire.rank();
        let others = (0..self.post.wire.size()).filter(|rank| *rank != own);
        for rank in others {
            self.post.wire.note(rank, note.encode())?;
        }
        Ok(())
    }

    fn answer_shared(&mut self) {
        while !self.shared.told.is_empty()
            && let Some(reply) = self.shared.asked.pop_front()
        {
            let told = self.shared.told.pop_front().unwrap_or_default();
            let _ = reply.send(Ok(told));
        }
    }

    /// Says that this rank makes no call any more.
    pub fn close(&mut self) -> Result<(), CommError> {
        if !mem::replace(&mut self.closing, true) {
            self.note_all(&Note::plain(Kind::Close, Vec::new()))?;
        }
        Ok(())
    }

    /// Whether every rank has said so and all messages are complete.
    pub fn is_closed(&mut self) -> Result<bool, CommError> {
        if !self.closing || self.closed.len() + 1 < self.post.wire.size() {
            return Ok(false);
        }
        // The last note of a rank comes after all others, so these have no receiver any more.
        let unclaimed = mem::take(&mut self.early);
        for (early, note) in unclaimed {
            let (Early::Collective { from, .. } | Early::Message { from, .. }) = early;
            self.post.discard(from, note.header.carriage)?;
        }
        Ok(self.collectives.is_empty() && self.post.is_idle())
    }

    /// Ends the wire of a rank that is closed.
    pub fn finish(self) -> Result<(), CommError> {
        self.post.wire.finish()
    }

    /// Ends every call with an error.
    pub fn fail_all(&mut self, error: &CommError) {
        let collectives = self.collectives.values().map(|collective| &collective.slot);
        let receives = self.receives.values().map(|job| &job.slot);
        for slot in collectives.chain(receives) {
            slot.fulfil(Err(error.clone()));
        }
        self.post.fail_letters(error);
        for reply in self.shared.asked.drain(..) {
            let _ = reply.send(Err(error.clone()));
        }
    }

    pub fn activity(&self) -> Activity {
        let waiting = !self.collectives.is_empty()
            || !self.receives.is_empty()
            || !self.shared.asked.is_empty()
            || self.closing
            || !self.post.wire.is_idle();
        match (self.post.is_moving(), waiting) {
            (true, _) => Activity::Moving,
            (false, true) => Activity::Waiting,
            (false, false) => Activity::None,
        }
    }
}
