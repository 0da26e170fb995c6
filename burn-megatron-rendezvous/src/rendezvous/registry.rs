//! The decisions of the coordinator. They do not depend on connections and clocks.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use super::message::{
    CallId, CoordinatorMessage, FailureCause, FailureKind, Hello, MissingRanks, RankMessage,
};
use super::rank_slot::{RegisteredRank, incompatibility, is_final};
use super::status_query::{QueryPurpose, StatusQuery};
use crate::failure_report::{FailureReport, RankPosition};
use crate::rank_runs::{RankRuns, ranks_verb};

/// The delay before a failure is reported. During this time, a cause with a higher precedence may be reported. For
/// example, a rank whose peer has died can report its own error before the death of the peer is detected.
const SETTLE_TIME: Duration = Duration::from_millis(250);
/// The minimum time between two messages that inform all ranks about ranks that have returned.
const RETURNED_INTERVAL: Duration = Duration::from_millis(250);

/// The timeouts of a rendezvous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RendezvousTimeouts {
    /// The timeout for all ranks to join.
    pub join: Duration,
    /// The time without a heartbeat after which a rank counts as lost.
    pub heartbeat: Duration,
}

/// The recipient of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Recipient {
    All,
    Rank(usize),
}

/// Messages to send.
pub(super) type Outgoing = Vec<(Recipient, CoordinatorMessage)>;

/// The state of the coordinator. All times count from the start of the coordinator.
#[derive(Debug)]
pub(super) struct Registry {
    pub(super) size: usize,
    world: u64,
    timeouts: RendezvousTimeouts,
    /// The ranks that have joined, indexed by rank.
    pub(super) slots: Vec<Option<RegisteredRank>>,
    /// The number of ranks that have joined, and the number of ranks that have returned. They are counted so that
    /// handling a message does not require a loop over all ranks.
    joined: usize,
    returned: usize,
    /// The ranks that have returned since the last message about returned ranks.
    newly_returned: Vec<usize>,
    next_returned: Duration,
    posted: BTreeMap<String, Vec<u8>>,
    readers: BTreeMap<String, Vec<usize>>,
    pub(super) queries: BTreeMap<u64, StatusQuery>,
    pub(super) next_query: u64,
    /// Recent answers by call. If the members of a group wait for a missing member, they all send a query at about the
    /// same time.
    pub(super) answers: BTreeMap<CallId, (Duration, MissingRanks)>,
    pub(super) causes: Vec<(usize, FailureCause)>,
    /// The kind of the failure that ended the world, and the report. `None` until the failure is decided.
    pub(super) failure: Option<(FailureKind, FailureReport)>,
    /// The number of connections that were rejected because of a different token, and the address of the last of them.
    rejected: (usize, Option<IpAddr>),
}

impl Registry {
    pub fn new(size: usize, world: u64, timeouts: RendezvousTimeouts) -> Self {
        Self {
            size,
            world,
            timeouts,
            slots: (0..size).map(|_| None).collect(),
            joined: 0,
            returned: 0,
            newly_returned: vec![],
            next_returned: Duration::ZERO,
            posted: BTreeMap::new(),
            readers: BTreeMap::new(),
            queries: BTreeMap::new(),
            next_query: 0,
            answers: BTreeMap::new(),
            causes: vec![],
            failure: None,
            rejected: (0, None),
        }
    }

    /// Returns whether every rank has joined.
    pub fn is_complete(&self) -> bool {
        self.joined == self.size
    }

    /// Returns whether any rank has joined.
    pub fn has_registered_ranks(&self) -> bool {
        self.joined > 0
    }

    /// Returns whether every rank has returned.
    pub fn all_returned(&self) -> bool {
        self.returned == self.size
    }

    /// Returns whether every rank that joined has closed its connection.
    pub fn all_disconnected(&self) -> bool {
        self.slots.iter().flatten().all(|rank| rank.disconnected)
    }

    /// Records that a connection was rejected because of a different token.
    pub fn wrong_token(&mut self, from: IpAddr) {
        self.rejected = (self.rejected.0 + 1, Some(from));
    }

    /// Adds an authenticated rank to the world.
    pub fn join(&mut self, hello: Hello, now: Duration) -> Result<Outgoing, JoinError> {
        self.check_world(&hello)?;
        if let Some(reason) = incompatibility(&hello, &self.slots) {
            // The slot stays vacant, so the world cannot become complete.
            let rank = hello.rank.min(self.size - 1);
            let outgoing = self.add_cause(rank, FailureKind::OwnError, reason.clone(), now);
            return Err(JoinError::Incompatible { reason, outgoing });
        }
        let rank = hello.rank;
        let RendezvousTimeouts { join, heartbeat } = &mut self.timeouts;
        // An invalid duration is ignored.
        if let Ok(requested) = Duration::try_from_secs_f64(hello.join_timeout) {
            *join = (*join).min(now.saturating_add(requested));
        }
        if let Ok(requested) = Duration::try_from_secs_f64(hello.heartbeat_timeout) {
            *heartbeat = (*heartbeat).min(requested);
        }
        self.slots[rank] = Some(RegisteredRank {
            hello,
            last_message: now,
            position: RankPosition::NoCalls,
            returned: None,
            disconnected: false,
        });
        self.joined += 1;
        if self.is_complete() {
            Ok(vec![(Recipient::All, CoordinatorMessage::AllJoined)])
        } else {
            Ok(vec![])
        }
    }

    /// Checks that a client belongs to this run and that the world is not complete.
    fn check_world(&self, hello: &Hello) -> Result<(), JoinError> {
        let unknown = |reason: String| Err(JoinError::UnknownClient(reason));
        if hello.world != self.world {
            return unknown(format!(
                "this is the rendezvous of another run; two runs on one machine need two ports \
                 (rank {} of {} connected)",
                hello.rank, hello.size
            ));
        }
        if self.is_complete() || self.failure.is_some() {
            return unknown(format!(
                "all {} ranks of this rendezvous have already joined; does another run use its port?",
                self.size
            ));
        }
        Ok(())
    }

    /// Handles the report of the launcher that the process of a rank has ended. The report is ignored if the rank has
    /// joined: a rank that has joined reports its own failure, or its connection is closed.
    pub fn process_ended(&mut self, rank: usize, how: &str, now: Duration) -> Outgoing {
        match self.slots.get(rank) {
            Some(None) => {
                let message = format!("its process {how} before it joined the rendezvous");
                self.add_cause(rank, FailureKind::OwnError, message, now)
            }
            _ => vec![],
        }
    }

    /// Handles a message from a rank.
    pub fn handle(&mut self, rank: usize, message: RankMessage, now: Duration) -> Outgoing {
        if let Some(registered) = self.slots[rank].as_mut() {
            registered.last_message = now;
        }
        match message {
            RankMessage::Heartbeat(position) => {
                self.set_position(rank, position);
                vec![]
            }
            RankMessage::Post { key, value } => {
                let readers = self.readers.remove(&key).unwrap_or_default().into_iter();
                let posted = |reader| (Recipient::Rank(reader), posted(&key, &value));
                let outgoing = readers.map(posted).collect();
                self.posted.insert(key, value);
                outgoing
            }
            RankMessage::Read { key } => match self.posted.get(&key) {
                Some(value) => vec![(Recipient::Rank(rank), posted(&key, value))],
                None => {
                    self.readers.entry(key).or_default().push(rank);
                    vec![]
                }
            },
            RankMessage::FindMissing { call, ranks } => self.find_missing(rank, call, &ranks, now),
            RankMessage::FindReturned { call, ranks } => self.find_returned(rank, call, &ranks),
            RankMessage::Status { question, status } => {
                self.set_position(rank, status.position.clone());
                if let Some(query) = self.queries.get_mut(&question) {
                    query.waiting.remove(&rank);
                    query.statuses.insert(rank, status);
                }
                self.finish_query(question, now)
            }
            RankMessage::Failed { cause, position } => {
                self.set_position(rank, RankPosition::Failed(Box::new(position)));
                for query in self.queries.values_mut() {
                    query.waiting.remove(&rank);
                }
                self.add_cause(rank, cause.kind, cause.message, now)
            }
            RankMessage::Returned(calls) => {
                if let Some(registered) = self.slots[rank].as_mut()
                    && registered.returned.is_none()
                {
                    registered.returned = Some(calls.into_iter().collect());
                    registered.position = RankPosition::Returned;
                    self.returned += 1;
                    self.newly_returned.push(rank);
                }
                if self.all_returned() {
                    vec![(Recipient::All, CoordinatorMessage::AllReturned)]
                } else {
                    vec![]
                }
            }
        }
    }

    /// Handles the end of the connection of a rank.
    pub fn disconnected(&mut self, rank: usize, now: Duration) -> Outgoing {
        let Some(registered) = self.slots[rank].as_mut() else {
            return vec![];
        };
        registered.disconnected = true;
        let is_expected =
            registered.returned.is_some() || matches!(registered.position, RankPosition::Failed(_));
        for query in self.queries.values_mut() {
            query.waiting.remove(&rank);
        }
        if is_expected || self.failure.is_some() {
            return self.finish_queries(now);
        }
        let (host, process) = (registered.hello.host.clone(), registered.hello.process);
        let last = self.position(rank);
        self.set_position(rank, RankPosition::Exited(Box::new(last)));
        let message = format!("its process {process} on {host} exited without reporting an error");
        self.add_cause(rank, FailureKind::ProcessExited, message, now)
    }

    /// Checks all timeouts.
    pub fn tick(&mut self, now: Duration) -> Outgoing {
        let mut outgoing = self.finish_queries(now);
        if self.failure.is_some() || !self.causes.is_empty() {
            return outgoing;
        }
        if !self.is_complete() && now >= self.timeouts.join {
            outgoing.extend(self.join_timed_out(now));
        }
        if !self.newly_returned.is_empty() && !self.all_returned() && now >= self.next_returned {
            self.next_returned = now + RETURNED_INTERVAL;
            let mut ranks = std::mem::take(&mut self.newly_returned);
            ranks.sort_unstable();
            let message = CoordinatorMessage::Returned(RankRuns::new(&ranks));
            outgoing.push((Recipient::All, message));
        }
        for rank in 0..self.size {
            let Some(registered) = self.slots[rank].as_ref() else {
                continue;
            };
            let silence = now.saturating_sub(registered.last_message);
            if !registered.disconnected && silence >= self.timeouts.heartbeat {
                let last = self.position(rank);
                let seconds = silence.as_secs();
                let message = format!(
                    "its process {} on {} has sent no heartbeat for {seconds} s: it is stopped, or \
                     cut off from the network",
                    registered.hello.process, registered.hello.host
                );
                self.set_position(rank, RankPosition::NoHeartbeat(seconds, Box::new(last)));
                outgoing.extend(self.add_cause(rank, FailureKind::NoHeartbeat, message, now));
            }
        }
        outgoing
    }

    fn join_timed_out(&mut self, now: Duration) -> Outgoing {
        let joined = |rank: &usize| self.slots[*rank].is_some();
        let missing: Vec<usize> = (0..self.size).filter(|rank| !joined(rank)).collect();
        let message = format!(
            "{} not joined the rendezvous within {} s; {} of {} ranks have: were all started with \
             the same address?{}",
            ranks_verb(&missing, "has", "have"),
            self.timeouts.join.as_secs(),
            self.size - missing.len(),
            self.size,
            self.rejected_connections()
        );
        self.add_cause(missing[0], FailureKind::OwnError, message, now)
    }

    fn rejected_connections(&self) -> String {
        match self.rejected {
            (count, Some(from)) => format!(
                " Connections with a different token were rejected ({count} times, last from {from})."
            ),
            _ => String::new(),
        }
    }

    /// Adds a cause of the failure. The first cause starts a status query of all ranks.
    pub(super) fn add_cause(
        &mut self,
        rank: usize,
        kind: FailureKind,
        message: String,
        now: Duration,
    ) -> Outgoing {
        if self.failure.is_some() {
            return vec![];
        }
        let first = self.causes.is_empty();
        self.causes.push((rank, FailureCause { kind, message }));
        // The death of a process has the highest precedence, so the report need not wait for other causes.
        let settled = match kind {
            FailureKind::ProcessExited => now,
            _ => now + SETTLE_TIME,
        };
        if first {
            let ranks: Vec<usize> = (0..self.size).collect();
            return self.start_query(QueryPurpose::Report, &ranks, settled, now);
        }
        for query in self.queries.values_mut() {
            query.not_before = query.not_before.min(settled);
        }
        self.finish_queries(now)
    }

    pub(super) fn position(&self, rank: usize) -> RankPosition {
        let registered = self.slots[rank].as_ref();
        registered.map_or(RankPosition::NeverJoined, |rank| rank.position.clone())
    }

    /// Sets the position of a rank, unless the current position is final.
    pub(super) fn set_position(&mut self, rank: usize, position: RankPosition) {
        if let Some(registered) = self.slots[rank].as_mut()
            && !is_final(&registered.position)
        {
            registered.position = position;
        }
    }
}

/// The reason why a rank was refused.
#[derive(Debug)]
pub(super) enum JoinError {
    /// The client does not belong to this world.
    UnknownClient(String),
    /// The rank belongs to this world but is incompatible with the world. Therefore the world fails.
    Incompatible { reason: String, outgoing: Outgoing },
}

fn posted(key: &str, value: &[u8]) -> CoordinatorMessage {
    CoordinatorMessage::Posted {
        key: key.to_owned(),
        value: value.to_owned(),
    }
}
