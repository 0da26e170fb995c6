//! The messages between the ranks and the coordinator. Each message is one JSON value on one line.

use std::io::{self, BufRead, Read};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::auth::{printable_name, printable_text};
use crate::failure_report::{FailureReport, RankPosition};
use crate::rank_runs::RankRuns;

/// The maximum length of a line.
const MAX_LINE_BYTES: u64 = 16 << 20;

/// A message that a rank sends after its [`Hello`]. The serialized names are part of the protocol.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum RankMessage {
    /// The rank is alive, at this position.
    #[serde(rename = "Alive")]
    Heartbeat(RankPosition),
    /// Stores a value under a key for all ranks.
    Post { key: String, value: Vec<u8> },
    /// Requests the value of a key. The answer is sent after a rank has posted the value.
    Read { key: String },
    /// Requests the members of the group that have not joined this call. `ranks` contains all members.
    #[serde(rename = "Where")]
    FindMissing { call: CallId, ranks: RankRuns },
    /// Requests the ranks in `ranks` that have returned without joining this call.
    FindReturned { call: CallId, ranks: RankRuns },
    /// The answer to [`CoordinatorMessage::QueryStatus`].
    #[serde(rename = "Stands")]
    Status {
        question: u64,
        #[serde(rename = "stand")]
        status: RankStatus,
    },
    /// The rank has failed. Contains the position of the rank.
    Failed {
        cause: FailureCause,
        #[serde(rename = "stood")]
        position: RankPosition,
    },
    /// The closure of the rank has returned. Contains the number of collectives per group.
    Returned(Vec<(u64, u64)>),
}

/// The identity of a rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Hello {
    /// The version of this library.
    pub version: String,
    pub rank: usize,
    pub size: usize,
    /// The id of the world, or 0 if the world has no id.
    pub world: u64,
    /// The host name of the rank, for messages.
    pub host: String,
    pub process: u32,
    /// The remaining time to wait for all ranks to join, in seconds.
    #[serde(rename = "gather")]
    pub join_timeout: f64,
    /// The number of seconds without a heartbeat after which a process counts as lost.
    #[serde(rename = "silence")]
    pub heartbeat_timeout: f64,
}

/// The id of a process group. All members use the same id. Two groups that share at least two ranks have different ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct GroupId(pub u64);

impl GroupId {
    /// The id of the group of all ranks.
    pub const WORLD: Self = Self(0);
}

/// A collective, identified by its group and its sequence number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct CallId {
    /// The id of the group.
    pub group: GroupId,
    /// The sequence number of the collective in the group, counted from 0.
    pub sequence: u64,
}

/// The answer of a rank to a status query: its position, and whether it has joined a call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankStatus {
    /// The current position of the rank.
    pub position: RankPosition,
    /// Whether the rank has joined the call in the query.
    #[serde(rename = "came")]
    pub joined: bool,
    /// The rank's call with the same sequence number as the call in the query.
    pub call: Option<String>,
}

/// The cause of a rank's failure, as reported by the rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailureCause {
    /// The kind of the failure.
    pub kind: FailureKind,
    /// The error message.
    pub message: String,
}

/// The kind of a failure. The kinds are listed in order of precedence. A failure of a later kind may be the consequence
/// of a failure of an earlier kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum FailureKind {
    /// The process of the rank has exited without reporting an error.
    #[serde(rename = "Gone")]
    ProcessExited,
    /// An error or a panic in the rank's own program.
    #[serde(rename = "Own")]
    OwnError,
    /// The process of the rank has sent no heartbeat before the timeout.
    #[serde(rename = "Silent")]
    NoHeartbeat,
    /// Two ranks issued different calls.
    #[serde(rename = "Disagreement")]
    Mismatch,
    /// Some ranks did not join a call before the timeout.
    #[serde(rename = "Waited")]
    Timeout,
    /// The transport of the engine reported an error.
    Transport,
}

/// A message that the coordinator sends to a rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum CoordinatorMessage {
    /// All ranks have joined.
    #[serde(rename = "Complete")]
    AllJoined,
    /// The rank is refused for this reason.
    Refused(String),
    /// The coordinator is alive.
    #[serde(rename = "Alive")]
    Heartbeat,
    /// The value requested by [`RankMessage::Read`].
    Posted { key: String, value: Vec<u8> },
    /// Requests the position of the rank. The answer is a [`RankMessage::Status`].
    #[serde(rename = "Ask")]
    QueryStatus { question: u64, call: Option<CallId> },
    /// The answer to [`RankMessage::FindMissing`].
    #[serde(rename = "Whereabouts")]
    MissingRanks { call: CallId, found: MissingRanks },
    /// The answer to [`RankMessage::FindReturned`].
    ReturnedBefore { call: CallId, ranks: RankRuns },
    /// A rank has failed. This ends the world.
    Failure(FailureReport),
    /// The ranks that have returned since the last message of this kind.
    Returned(RankRuns),
    /// All ranks have returned.
    AllReturned,
    /// The rank must stop after the current step.
    Stop,
}

/// The ranks that have not joined a call, and the calls of the ranks that have joined.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MissingRanks {
    /// The members of the group that have not joined the call or that do not answer.
    pub absent: RankRuns,
    /// The calls that the other members have joined, each with the ranks of these members.
    pub calls: Vec<(String, RankRuns)>,
}

impl Hello {
    /// Parses the hello of a rank. All texts in it are made [printable](printable_name).
    pub fn read(text: &str) -> Result<Self, serde_json::Error> {
        parse(text.as_bytes(), printable_name)
    }
}

/// Serializes a message as one line of JSON.
///
/// # Panics
/// Never, because the keys of all maps in a message are strings.
pub(super) fn line(message: &impl Serialize) -> Vec<u8> {
    let mut line = serde_json::to_vec(message).expect("a message can be written as JSON");
    line.push(b'\n');
    line
}

/// Reads one line and parses the message. Returns `None` if the connection is closed. All texts in the message are made
/// [printable](printable_text).
pub(super) fn read<T: DeserializeOwned>(from: &mut impl BufRead) -> io::Result<Option<T>> {
    let mut line = Vec::new();
    from.by_ref()
        .take(MAX_LINE_BYTES)
        .read_until(b'\n', &mut line)?;
    match line.last() {
        None => Ok(None),
        Some(b'\n') => Ok(Some(parse(&line, printable_text)?)),
        // The line is truncated or longer than the limit.
        Some(_) => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// Parses JSON and escapes all texts.
fn parse<T: DeserializeOwned>(json: &[u8], escape: fn(&str) -> String) -> serde_json::Result<T> {
    let mut value = serde_json::from_slice(json)?;
    escape_texts(&mut value, escape);
    serde_json::from_value(value)
}

fn escape_texts(value: &mut Value, escape: fn(&str) -> String) {
    match value {
        Value::String(text) => *text = escape(text),
        Value::Array(values) => values.iter_mut().for_each(|v| escape_texts(v, escape)),
        Value::Object(fields) => fields.values_mut().for_each(|v| escape_texts(v, escape)),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_as_they_were_written() {
        let messages = [
            RankMessage::Heartbeat(RankPosition::Waiting(
                "call 3 barrier over world [0]".into(),
            )),
            RankMessage::Post {
                key: "id".into(),
                value: vec![0, 10, 255],
            },
            RankMessage::Returned(vec![(0, 7), (u64::MAX, 1)]),
        ];
        let lines: Vec<u8> = messages.iter().flat_map(line).collect();
        let mut from = lines.as_slice();
        for message in &messages {
            assert_eq!(
                read::<RankMessage>(&mut from).unwrap().as_ref(),
                Some(message)
            );
        }
        assert_eq!(read::<RankMessage>(&mut from).unwrap(), None);
    }

    #[test]
    fn other_text_is_an_error() {
        for text in ["GET / HTTP/1.1\r\n", "{\"Alive\":\"Nowhere\"", "{}\n"] {
            assert!(read::<RankMessage>(&mut text.as_bytes()).is_err(), "{text}");
        }
    }

    #[test]
    fn names_in_the_protocol_are_stable() {
        let json = |message: &RankMessage| serde_json::to_string(message).unwrap();
        let position = RankPosition::Failed(Box::new(RankPosition::NoCalls));
        let status = RankStatus {
            position: RankPosition::NoHeartbeat(3, Box::new(RankPosition::NeverJoined)),
            joined: true,
            call: None,
        };
        let cause = FailureCause {
            kind: FailureKind::ProcessExited,
            message: "x".into(),
        };
        assert_eq!(
            json(&RankMessage::Heartbeat(RankPosition::Waiting("x".into()))),
            r#"{"Alive":{"At":"x"}}"#
        );
        assert_eq!(
            json(&RankMessage::Status {
                question: 1,
                status
            }),
            r#"{"Stands":{"question":1,"stand":{"position":{"Silent":[3,"Absent"]},"came":true,"call":null}}}"#
        );
        assert_eq!(
            json(&RankMessage::Failed { cause, position }),
            r#"{"Failed":{"cause":{"kind":"Gone","message":"x"},"stood":{"Failed":"Nowhere"}}}"#
        );
        let report = CoordinatorMessage::Failure(FailureReport::default());
        assert_eq!(
            serde_json::to_string(&report).unwrap(),
            r#"{"Failure":{"rank":0,"message":"","verdict":""}}"#
        );
    }
}
