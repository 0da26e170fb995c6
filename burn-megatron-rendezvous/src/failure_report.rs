//! The failure of a world, and what each rank was doing at that moment.

use std::collections::HashMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::rank_runs::ranks_verb;

/// The position of a rank: its current activity, or the activity that it last reported. Serialized names are the names
/// of the rendezvous' protocol.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum RankPosition {
    /// It waits in a call.
    #[serde(rename = "At")]
    Waiting(String),
    /// It has completed this call and is outside of calls.
    #[serde(rename = "Past")]
    Completed(String),
    /// It has started this call, has not waited for it, and is outside of calls.
    Started(String),
    /// It has made no call.
    #[serde(rename = "Nowhere")]
    NoCalls,
    /// Its closure has returned.
    Returned,
    /// Its closure has failed at this position.
    Failed(Box<RankPosition>),
    /// The process has sent no heartbeat for this number of seconds; has the last known position.
    #[serde(rename = "Silent")]
    NoHeartbeat(u64, Box<RankPosition>),
    /// Its process has exited; with its last known position.
    #[serde(rename = "Gone")]
    Exited(Box<RankPosition>),
    /// It never joined the rendezvous.
    #[serde(rename = "Absent")]
    NeverJoined,
}

impl RankPosition {
    /// A clause about these ranks, such as `rank 3 is at call 4 barrier over world [0, 1, 2, 3]`.
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

    /// The last known position of a rank that no longer reports one.
    fn last_seen(&self) -> String {
        match self {
            RankPosition::Waiting(call) => format!("last seen at {call}"),
            RankPosition::Completed(call) => format!("last seen past {call}"),
            RankPosition::Started(call) => format!("last seen having started {call}"),
            _ => "last seen before any call".into(),
        }
    }
}

/// Describes what one rank is doing.
pub fn describe_rank(rank: usize, position: &RankPosition) -> String {
    position.clause(&[rank])
}

/// One line that describes what every rank is doing; ranks at the same position share a clause.
pub fn describe_ranks(positions: &[RankPosition]) -> String {
    let all: Vec<_> = positions.iter().cloned().enumerate().collect();
    describe_some(&all)
}

/// [`describe_ranks`] for some of the ranks.
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

/// The failure that ended a world. Its `Display` is the report for the user.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailureReport {
    /// The rank whose failure has the highest precedence; of equal ones, the first.
    pub rank: usize,
    /// Its error.
    pub message: String,
    /// One line that describes what each rank was doing.
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
