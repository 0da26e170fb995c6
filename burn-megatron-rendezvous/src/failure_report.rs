//! The report of a failure that ended a world, and the position of each rank at the time of the failure.

use std::collections::HashMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::rank_runs::ranks_verb;

/// The position of a rank in its program: the current activity of the rank, or its last reported activity. The
/// serialized names are part of the rendezvous protocol.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum RankPosition {
    /// The rank is waiting for this call to complete.
    #[serde(rename = "At")]
    Waiting(String),
    /// The rank has completed this call and is currently not in a call.
    #[serde(rename = "Past")]
    Completed(String),
    /// The rank has started this call but has not waited for it. It is currently not in a call.
    Started(String),
    /// The rank has not issued any call.
    #[serde(rename = "Nowhere")]
    NoCalls,
    /// The closure of the rank has returned.
    Returned,
    /// The closure of the rank has failed. Contains the position of the rank at the failure.
    Failed(Box<RankPosition>),
    /// The process of the rank has sent no heartbeat for this number of seconds. Contains the last known position.
    #[serde(rename = "Silent")]
    NoHeartbeat(u64, Box<RankPosition>),
    /// The process of the rank has exited. Contains the last known position.
    #[serde(rename = "Gone")]
    Exited(Box<RankPosition>),
    /// The rank has never joined the rendezvous.
    #[serde(rename = "Absent")]
    NeverJoined,
}

impl RankPosition {
    /// Returns a clause about the ranks at this position, for example
    /// `rank 3 is at call 4 barrier over world [0, 1, 2, 3]`.
    fn clause(&self, ranks: &[usize]) -> String {
        let verb = |singular, plural| ranks_verb(ranks, singular, plural);
        match self {
            RankPosition::Waiting(call) => format!("{} at {call}", verb("is", "are")),
            RankPosition::Completed(call) => format!("{} past {call}", verb("is", "are")),
            RankPosition::Started(call) => format!("{} started {call}", verb("has", "have")),
            RankPosition::NoCalls => format!("{} made no call", verb("has", "have")),
            RankPosition::Returned => verb("has returned", "have returned"),
            RankPosition::Failed(last) => match &**last {
                RankPosition::Waiting(call) => verb("failed at", "failed at") + " " + call,
                RankPosition::Completed(call) => verb("failed past", "failed past") + " " + call,
                RankPosition::Started(call) => verb("failed", "failed") + " having started " + call,
                _ => verb("failed before any call", "failed before any call"),
            },
            RankPosition::NoHeartbeat(seconds, last) => {
                let silent = verb("has sent no heartbeat for", "have sent no heartbeat for");
                format!("{silent} {seconds} s, {}", last.last_seen())
            }
            RankPosition::Exited(last) => {
                const EXITED: &str = "exited without reporting an error";
                format!("{}, {}", verb(EXITED, EXITED), last.last_seen())
            }
            RankPosition::NeverJoined => verb("never joined", "never joined"),
        }
    }

    /// Describes the last known position of a rank that no longer reports its position.
    fn last_seen(&self) -> String {
        match self {
            RankPosition::Waiting(call) => format!("last seen at {call}"),
            RankPosition::Completed(call) => format!("last seen past {call}"),
            RankPosition::Started(call) => format!("last seen having started {call}"),
            _ => "last seen before any call".into(),
        }
    }
}

/// Describes the position of one rank.
pub fn describe_rank(rank: usize, position: &RankPosition) -> String {
    position.clause(&[rank])
}

/// Describes the positions of all ranks in one line. Ranks at the same position are combined.
pub fn describe_ranks(positions: &[RankPosition]) -> String {
    let all: Vec<_> = positions.iter().cloned().enumerate().collect();
    describe_some(&all)
}

/// Describes the positions of some of the ranks in one line. Ranks at the same position are combined.
pub fn describe_some(positions: &[(usize, RankPosition)]) -> String {
    let mut clauses: Vec<(&RankPosition, Vec<usize>)> = Vec::new();
    let mut index: HashMap<&RankPosition, usize> = HashMap::new();
    for (rank, position) in positions {
        let place = *index.entry(position).or_insert_with(|| {
            clauses.push((position, vec![]));
            clauses.len() - 1
        });
        clauses[place].1.push(*rank);
    }
    let texts: Vec<String> = clauses
        .iter()
        .map(|(position, ranks)| position.clause(ranks))
        .collect();
    texts.join("; ")
}

/// The report of the failure that ended a world. `Display` writes the report for the user.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailureReport {
    /// The rank whose failure is most likely the cause of the other failures. It is the rank whose kind of failure has
    /// the highest precedence. If several failures are of this kind, it is the rank that failed first.
    pub rank: usize,
    /// The error message of this rank.
    pub message: String,
    /// A text that describes the position of each rank.
    #[serde(rename = "verdict")]
    pub positions: String,
}

impl fmt::Display for FailureReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            rank,
            message,
            positions,
        } = self;
        write!(f, "rank {rank} failed: {message}\n{positions}")
    }
}
