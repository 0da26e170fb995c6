//! Relays at the registry: each has the connections of the ranks of one node, and one to the coordinator.

use std::collections::BTreeSet;
use std::time::Duration;

use super::message::{FailureKind, Hello};
use super::rank_slot::other_settings;
use super::registry::{JoinError, Outgoing, Registry};
use super::relay_message::RelayMessage;
use crate::error::list_ranks;
use crate::report::call_log::RankPosition;

/// A relay with the ranks that have joined over it.
#[derive(Debug)]
pub(super) struct RelaySlot {
    process: u32,
    host: String,
    ranks: BTreeSet<usize>,
    last_message: Duration,
}

impl RelaySlot {
    /// `ranks 8, 9`.
    fn ranks(&self) -> String {
        let ranks: Vec<usize> = self.ranks.iter().copied().collect();
        format!("ranks {}", list_ranks(&ranks))
    }
}

/// The consequences of a message of a relay.
#[derive(Debug, Default)]
pub(super) struct RelayOutcome {
    /// Ranks that have joined over this relay.
    pub joined: Vec<usize>,
    /// Ranks of this relay that are refused, and why.
    pub refused: Vec<(usize, String)>,
    pub outgoing: Outgoing,
}

impl Registry {
    /// A relay connects.
    pub fn relay_joins(&mut self, hello: &Hello, now: Duration) -> Result<(), JoinError> {
        self.check_world(hello)?;
        if let Some(reason) = other_settings(hello, self.size) {
            let rank = hello.rank.min(self.size - 1);
            let outgoing = self.add_cause(rank, FailureKind::OwnError, reason.clone(), now);
            return Err(JoinError::Incompatible { reason, outgoing });
        }
        if self.relays.contains_key(&hello.rank) {
            let reason = format!(
                "there already is a relay in a process of rank {}",
                hello.rank
            );
            return Err(JoinError::UnknownClient(reason));
        }
        let relay = RelaySlot {
            process: hello.process,
            host: hello.host.clone(),
            ranks: BTreeSet::new(),
            last_message: now,
        };
        self.relays.insert(hello.rank, relay);
        Ok(())
    }

    /// Handles a message of the relay in the process of `relay`. What it says about other ranks than its own is ignored.
    pub fn handle_relay(
        &mut self,
        relay: usize,
        message: RelayMessage,
        now: Duration,
    ) -> RelayOutcome {
        let mut outcome = RelayOutcome::default();
        for hello in message.joined {
            let rank = hello.rank;
            match self.join(hello, now) {
                Ok(outgoing) => {
                    outcome.joined.push(rank);
                    outcome.outgoing.extend(outgoing);
                }
                Err(JoinError::UnknownClient(reason)) => outcome.refused.push((rank, reason)),
                Err(JoinError::Incompatible { reason, outgoing }) => {
                    outcome.refused.push((rank, reason));
                    outcome.outgoing.extend(outgoing);
                }
            }
        }
        // The relay has told these ranks.
        for hello in message.duplicates {
            if let Err(JoinError::Incompatible { outgoing, .. }) = self.join(hello, now) {
                outcome.outgoing.extend(outgoing);
            }
        }
        let Some(slot) = self.relays.get_mut(&relay) else {
            return outcome;
        };
        slot.last_message = now;
        slot.ranks.extend(&outcome.joined);
        let own = slot.ranks.clone();
        for rank in &own {
            if let Some(registered) = self.slots[*rank].registered_mut() {
                registered.last_message = now;
            }
        }
        for (rank, seconds) in message.silent {
            let silence = Duration::try_from_secs_f64(seconds).unwrap_or_default();
            if own.contains(&rank)
                && let Some(registered) = self.slots[rank].registered_mut()
            {
                registered.last_message = now.saturating_sub(silence);
            }
        }
        for (position, ranks) in message.positions {
            for rank in ranks.into_iter().filter(|rank| own.contains(rank)) {
                self.set_position(rank, position.clone());
            }
        }
        for (message, ranks) in message.messages {
            for rank in ranks.into_iter().filter(|rank| own.contains(rank)) {
                outcome
                    .outgoing
                    .extend(self.handle(rank, message.clone(), now));
            }
        }
        for rank in message
            .disconnected
            .into_iter()
            .filter(|rank| own.contains(rank))
        {
            outcome.outgoing.extend(self.disconnected(rank, now));
        }
        outcome
    }

    /// The connection of a relay is closed, which is the end of the process of its rank: the others on its node are cut off.
    pub fn relay_disconnected(&mut self, relay: usize, now: Duration) -> Outgoing {
        let Some(slot) = self.relays.remove(&relay) else {
            return vec![];
        };
        let connected = |rank: &usize| {
            let registered = self.slots[*rank].registered();
            registered.is_some_and(|rank| !rank.disconnected)
        };
        let left: Vec<usize> = slot.ranks.iter().copied().filter(connected).collect();
        for rank in left.iter().filter(|rank| **rank != relay) {
            self.cut_off(*rank, now);
        }
        if left.contains(&relay) {
            self.exited(relay, &format!("; it relayed {}", slot.ranks()), now)
        } else if left.is_empty() || self.failure().is_some() || self.all_returned() {
            self.finish_queries(now)
        } else {
            let message = format!(
                "its process {} on {}, which relays {}, exited before they did",
                slot.process,
                slot.host,
                slot.ranks()
            );
            self.add_cause(relay, FailureKind::ProcessExited, message, now)
        }
    }

    /// A rank whose relay is lost answers no query.
    fn cut_off(&mut self, rank: usize, now: Duration) {
        let last = Box::new(self.position(rank));
        let Some(registered) = self.slots[rank].registered_mut() else {
            return;
        };
        registered.disconnected = true;
        let silence = now.saturating_sub(registered.last_message).as_secs();
        self.set_position(rank, RankPosition::NoHeartbeat(silence, last));
        for query in self.queries.values_mut() {
            query.waiting.remove(&rank);
        }
    }

    /// A relay that sends nothing is a failure of the rank in whose process it is.
    pub(super) fn check_relays(&mut self, timeout: Duration, now: Duration) -> Outgoing {
        let silence = |slot: &RelaySlot| now.saturating_sub(slot.last_message);
        let is_silent = |slot: &RelaySlot| silence(slot) >= timeout && !slot.ranks.is_empty();
        let silent = self.relays.iter().find(|(_, slot)| is_silent(slot));
        let Some((rank, slot)) = silent else {
            return vec![];
        };
        let (rank, ranks, seconds) = (*rank, slot.ranks.clone(), silence(slot).as_secs());
        let message = format!(
            "its process {} on {}, which relays {}, has sent no heartbeat for {seconds} s: it is stopped, or \
             cut off from the network",
            slot.process,
            slot.host,
            slot.ranks()
        );
        for rank in ranks {
            self.cut_off(rank, now);
        }
        self.add_cause(rank, FailureKind::NoHeartbeat, message, now)
    }
}
