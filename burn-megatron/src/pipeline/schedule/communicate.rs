//! Sends and receives between the computations of a schedule.

use std::collections::HashMap;

use super::ring::ring;
use super::validate::{Reason, check_alone};
use super::{Action, ActionKind, Invalid, Schedule};

impl Schedule {
    /// This schedule with sends and receives in place of those it has.
    ///
    /// The ranks are followed as if a send waited until the other rank stood at the matching
    /// receive. A rank sends directly after it computed something for another rank, and receives
    /// directly before it needs something. Where some ranks then wait for one another in a ring,
    /// one send of the ring is received at once: the one that was computed first, if forward, input
    /// gradient and weight gradient all take the same time. (Among equals an activation goes before
    /// a gradient, and a lower stage before a higher one.) With such times whatever is received
    /// before its use has arrived by then, so that even a rank that waits in each receive loses
    /// nothing. All messages get one common order, which every rank keeps, so that the lists end
    /// whether or not sends wait.
    ///
    /// # Errors
    ///
    /// [`Invalid`] where the computations break a rule by themselves.
    pub fn with_communication(self) -> Result<Self, Invalid> {
        let mut bare = self;
        for actions in &mut bare.ranks {
            actions.retain(|action| action.kind.is_compute());
        }
        for rank in 0..bare.ranks() {
            check_alone(&bare, rank, false)?;
        }
        let ranks = Writer::new(&bare).write()?;
        Ok(Schedule { ranks, ..bare })
    }
}

/// Follows all ranks at once and writes down what they do.
struct Writer<'a> {
    schedule: &'a Schedule,
    lanes: Vec<Lane>,
}

/// How far a rank has come.
#[derive(Default)]
struct Lane {
    /// The index of the next computation.
    next: usize,
    /// When the last computation ends, if sends do not wait.
    clock: usize,
    /// What the last computation gave another rank, until it is sent.
    unsent: Option<Action>,
    /// When what was received was computed.
    received: HashMap<Action, usize>,
    written: Vec<Action>,
}

/// What a rank stands at.
enum Standing {
    Compute(Action),
    Message(Action),
    End,
}

impl<'a> Writer<'a> {
    fn new(schedule: &'a Schedule) -> Self {
        let lanes = (0..schedule.ranks()).map(|_| Lane::default()).collect();
        Writer { schedule, lanes }
    }

    fn write(mut self) -> Result<Vec<Vec<Action>>, Invalid> {
        let mut ready: Vec<usize> = (0..self.lanes.len()).collect();
        loop {
            while let Some(rank) = ready.pop() {
                ready.extend(self.advance(rank));
            }
            let unfinished =
                (0..self.lanes.len()).find(|rank| !matches!(self.standing(*rank), Standing::End));
            match unfinished {
                None => return Ok(self.lanes.into_iter().map(|lane| lane.written).collect()),
                Some(rank) => ready = self.open_ring(rank)?,
            }
        }
    }

    fn standing(&self, rank: usize) -> Standing {
        let lane = &self.lanes[rank];
        if let Some(send) = lane.unsent {
            return Standing::Message(send);
        }
        match self.schedule.ranks[rank].get(lane.next) {
            None => Standing::End,
            Some(action) => match self.schedule.needs(action) {
                Some(receive) if !lane.received.contains_key(&receive) => {
                    Standing::Message(receive)
                }
                _ => Standing::Compute(*action),
            },
        }
    }

    /// Lets a rank do what it can; the ranks that may go on after a message are returned.
    fn advance(&mut self, rank: usize) -> Vec<usize> {
        loop {
            match self.standing(rank) {
                Standing::Compute(action) => {
                    let needs = self.schedule.needs(&action);
                    let unsent = self.schedule.gives(&action);
                    let lane = &mut self.lanes[rank];
                    let arrival = needs.and_then(|receive| lane.received.get(&receive));
                    lane.clock = lane.clock.max(arrival.copied().unwrap_or(0)) + duration(&action);
                    lane.written.push(action);
                    lane.unsent = unsent;
                    lane.next += 1;
                }
                Standing::Message(message) => {
                    let (peer, counterpart) = self.other_end(&message);
                    let met = matches!(
                        self.standing(peer), Standing::Message(other) if other == counterpart
                    );
                    if !met {
                        return vec![];
                    }
                    self.exchange(rank, message);
                    return vec![peer, rank];
                }
                Standing::End => return vec![],
            }
        }
    }

    /// Writes down both ends of a message.
    fn exchange(&mut self, rank: usize, message: Action) {
        let (peer, counterpart) = self.other_end(&message);
        let sender = if message.kind.is_send() { rank } else { peer };
        let computed = self.lanes[sender].clock;
        for (rank, action) in [(rank, message), (peer, counterpart)] {
            let lane = &mut self.lanes[rank];
            lane.written.push(action);
            if action.kind.is_send() {
                lane.unsent = None;
            } else {
                lane.received.insert(action, computed);
            }
        }
    }

    /// Has one send of a ring of waiting ranks received at once.
    fn open_ring(&mut self, start: usize) -> Result<Vec<usize>, Invalid> {
        let ring = ring(start, |rank| self.waits_for(rank).0);
        let send = ring
            .iter()
            .filter_map(|rank| self.lanes[*rank].unsent.map(|send| (send, *rank)))
            .min_by_key(|(send, rank)| (self.lanes[*rank].clock, send.kind, send.stage));
        let Some((send, rank)) = send else {
            return Err(self.invalid(&ring));
        };
        let peer = self.other_end(&send).0;
        self.exchange(rank, send);
        Ok(vec![peer, rank])
    }

    /// The rank that a rank waits for, and the message between them.
    fn waits_for(&self, rank: usize) -> (usize, Action) {
        match self.standing(rank) {
            Standing::Message(message) => (self.other_end(&message).0, message),
            // A rank at its end has computed, sent and received all, and nobody waits for it; and
            // one that can compute does not wait.
            _ => unreachable!("rank {rank} does not wait"),
        }
    }

    /// The error for ranks that all wait for something that is computed too late.
    fn invalid(&self, ring: &[usize]) -> Invalid {
        let rank = ring[0];
        let position = self.lanes[rank].next;
        let ring = ring
            .iter()
            .map(|rank| (*rank, self.waits_for(*rank).1))
            .collect();
        Invalid {
            rank,
            position,
            actions: self.schedule.ranks[rank].len(),
            action: self.schedule.ranks[rank][position],
            reason: Reason::Deadlock { ring },
        }
    }

    fn other_end(&self, message: &Action) -> (usize, Action) {
        self.schedule
            .other_end(message)
            .expect("only messages between ranks are written")
    }
}

/// How long a computation takes, for the order of messages.
fn duration(action: &Action) -> usize {
    if action.kind == ActionKind::Backward {
        2
    } else {
        1
    }
}
