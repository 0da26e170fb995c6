//! The messages between a relay and the coordinator: those of several ranks in one.

use serde::{Deserialize, Serialize};

use super::message::{CoordinatorMessage, Hello, Message, RankMessage};
use crate::report::call_log::RankPosition;

/// The news of the ranks of a relay since its last message. Each message is a heartbeat of all of them that are
/// connected, except for those that are silent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct RelayMessage {
    /// They have joined.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub joined: Vec<Hello>,
    /// They were refused by the relay, which already has a rank of that number.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub duplicates: Vec<Hello>,
    /// New positions, with the ranks.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub positions: Vec<(RankPosition, Vec<usize>)>,
    /// Messages other than heartbeats, each with the ranks that sent it, in the order of each rank.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub messages: Vec<(RankMessage, Vec<usize>)>,
    /// Ranks that have sent nothing for so many seconds.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub silent: Vec<(usize, f64)>,
    /// Ranks whose connections are closed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub disconnected: Vec<usize>,
}

impl RelayMessage {
    /// Whether it is a heartbeat alone.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Adds a message of a rank; equal ones of several ranks are sent once.
    pub fn add(&mut self, rank: usize, message: RankMessage) {
        // A message joins an equal one only where no later message of this rank is passed.
        let own = |(_, ranks): &(RankMessage, Vec<usize>)| ranks.contains(&rank);
        let first = self.messages.iter().rposition(own).map_or(0, |i| i + 1);
        let mut later = self.messages[first..].iter_mut();
        match later.find(|(other, _)| *other == message) {
            Some((_, ranks)) => ranks.push(rank),
            None => self.messages.push((message, vec![rank])),
        }
    }

    /// Sets the position of a rank.
    pub fn set_position(&mut self, rank: usize, position: RankPosition) {
        self.positions
            .iter_mut()
            .for_each(|(_, ranks)| ranks.retain(|other| *other != rank));
        self.positions.retain(|(_, ranks)| !ranks.is_empty());
        let mut positions = self.positions.iter_mut();
        match positions.find(|(other, _)| *other == position) {
            Some((_, ranks)) => ranks.push(rank),
            None => self.positions.push((position, vec![rank])),
        }
    }
}

impl Message for RelayMessage {
    fn printable(self) -> Self {
        let hellos = |all: Vec<Hello>| all.into_iter().map(Hello::printable).collect();
        let positions = self.positions.into_iter();
        let messages = self.messages.into_iter();
        Self {
            joined: hellos(self.joined),
            duplicates: hellos(self.duplicates),
            positions: positions
                .map(|(it, ranks)| (it.printable(), ranks))
                .collect(),
            messages: messages
                .map(|(it, ranks)| (it.printable(), ranks))
                .collect(),
            ..self
        }
    }
}

/// A message of the coordinator for ranks of a relay.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Delivery {
    /// For these; `None` for all.
    pub ranks: Option<Vec<usize>>,
    pub message: CoordinatorMessage,
}

impl Message for Delivery {
    fn printable(self) -> Self {
        Self {
            message: self.message.printable(),
            ..self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_messages_of_several_ranks_are_one() {
        let read = |key: &str| RankMessage::Read { key: key.into() };
        let mut message = RelayMessage::default();
        assert!(message.is_empty());
        for rank in 8..11 {
            message.add(rank, read("a"));
            message.add(rank, read("b"));
        }
        let ranks = vec![8, 9, 10];
        assert_eq!(
            message.messages,
            [(read("a"), ranks.clone()), (read("b"), ranks)]
        );
        // The order of each rank is kept.
        message.add(9, read("a"));
        assert_eq!(message.messages[2], (read("a"), vec![9]));
    }

    #[test]
    fn the_last_position_of_each_rank_is_sent() {
        let at = |call: &str| RankPosition::Waiting(call.into());
        let mut message = RelayMessage::default();
        for (rank, call) in [(8, "a"), (9, "a"), (8, "b"), (9, "b")] {
            message.set_position(rank, at(call));
        }
        assert_eq!(message.positions, [(at("b"), vec![8, 9])]);
    }
}
