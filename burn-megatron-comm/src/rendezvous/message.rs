//! The messages between ranks and coordinator: one JSON value per line.

use std::io::{self, BufRead, Read, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::auth::{printable_name, printable_text};
use crate::rank_runs::RankRuns;
use crate::report::call_log::RankPosition;

/// The longest line that is accepted.
const MAX_LINE_BYTES: u64 = 16 << 20;

/// A message whose texts are escaped when it is received.
pub(super) trait Message: DeserializeOwned {
    /// The message with its texts made [printable](printable_text).
    fn printable(self) -> Self;
}

/// A message of a rank, after its [`Hello`]. Serialized names are those of the protocol.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum RankMessage {
    /// It is alive, at this position.
    #[serde(rename = "Alive")]
    Heartbeat(RankPosition),
    /// Store this value for all ranks.
    Post { key: String, value: Vec<u8> },
    /// Send this value once a rank has posted it.
    Read { key: String },
    /// Which of these ranks, the members of its group, have not joined this call?
    #[serde(rename = "Where")]
    FindMissing { call: CallId, ranks: RankRuns },
    /// Which of these ranks have returned without joining this call?
    FindReturned { call: CallId, ranks: RankRuns },
    /// The answer to [`CoordinatorMessage::QueryStatus`].
    #[serde(rename = "Stands")]
    Status {
        question: u64,
        #[serde(rename = "stand")]
        status: RankStatus,
    },
    /// It has failed at this position.
    Failed {
        cause: FailureCause,
        #[serde(rename = "stood")]
        position: RankPosition,
    },
    /// Its closure has returned; with the number of collectives it made, by group.
    Returned(Vec<(u64, u64)>),
}

/// The identity of a rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Hello {
    /// The version of this library.
    pub version: String,
    pub rank: usize,
    pub size: usize,
    /// The id of the world; 0 if it has none.
    pub world: u64,
    /// Its host name, for messages.
    pub host: String,
    pub process: u32,
    /// The remaining time to wait for all ranks to join, in seconds.
    #[serde(rename = "gather")]
    pub join_timeout: f64,
    /// After how many seconds without a heartbeat another process counts as lost.
    #[serde(rename = "silence")]
    pub heartbeat_timeout: f64,
    /// Whether the connection is that of the relay in the process of this rank, not that of the rank.
    #[serde(default)]
    pub relay: bool,
}

/// A collective, by the id of its group and its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) struct CallId {
    pub group: u64,
    pub sequence: u64,
}

/// The position of a rank, and whether it has joined a call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RankStatus {
    pub position: RankPosition,
    /// Whether it has joined the call of the query.
    #[serde(rename = "came")]
    pub joined: bool,
    /// The call that it made under that number.
    pub call: Option<String>,
}

/// Why a rank failed, as it reports itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FailureCause {
    pub kind: FailureKind,
    pub message: String,
}

/// The kind of a failure, in order of precedence: later kinds may be consequences of earlier ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum FailureKind {
    /// Its process has exited without reporting an error.
    #[serde(rename = "Gone")]
    ProcessExited,
    /// An error or a panic of its own.
    #[serde(rename = "Own")]
    OwnError,
    /// Its process sends no heartbeats.
    #[serde(rename = "Silent")]
    NoHeartbeat,
    /// The calls of two ranks do not match.
    #[serde(rename = "Disagreement")]
    Mismatch,
    /// Other ranks did not join a call.
    #[serde(rename = "Waited")]
    Timeout,
    /// An error of the transport.
    Transport,
}

/// A message of the coordinator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum CoordinatorMessage {
    /// All ranks have joined.
    #[serde(rename = "Complete")]
    AllJoined,
    /// This rank is refused.
    Refused(String),
    /// The coordinator is alive.
    #[serde(rename = "Alive")]
    Heartbeat,
    /// The value requested by [`RankMessage::Read`].
    Posted { key: String, value: Vec<u8> },
    /// Asks for a [`RankMessage::Status`].
    #[serde(rename = "Ask")]
    QueryStatus { question: u64, call: Option<CallId> },
    /// The answer to [`RankMessage::FindMissing`].
    #[serde(rename = "Whereabouts")]
    MissingRanks { call: CallId, found: MissingRanks },
    /// The answer to [`RankMessage::FindReturned`].
    ReturnedBefore { call: CallId, ranks: RankRuns },
    /// A rank has failed, which ends the world.
    Failure(FailureReport),
    /// These ranks have returned since the last such message.
    Returned(RankRuns),
    /// All ranks have returned.
    AllReturned,
    /// Stop after the current step.
    Stop,
    /// Of a relay to a rank that joins: it is in the process of this rank.
    Relay { rank: usize },
    /// Of a relay: it has lost the coordinator, for this reason.
    Lost(String),
}

/// The ranks that have not joined a call, and the calls of those that have.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MissingRanks {
    /// Members of the group that have not joined, or do not answer.
    pub absent: RankRuns,
    /// The calls of those that have joined, with their ranks.
    pub calls: Vec<(String, RankRuns)>,
}

/// The failure that ended a world.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FailureReport {
    /// The rank whose failure has the highest precedence; of equal ones, the first.
    pub rank: usize,
    /// Its error.
    pub message: String,
    /// One line that describes what each rank was doing.
    #[serde(rename = "verdict")]
    pub positions: String,
}

impl Hello {
    /// Parses the hello of a rank; its names are made [printable](printable_name).
    pub fn read(text: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(text).map(Self::printable)
    }

    pub(super) fn printable(self) -> Self {
        Self {
            version: printable_name(&self.version),
            host: printable_name(&self.host),
            ..self
        }
    }
}

impl Message for RankMessage {
    fn printable(self) -> Self {
        match self {
            Self::Heartbeat(position) => Self::Heartbeat(position.printable()),
            Self::Status { question, status } => Self::Status {
                question,
                status: RankStatus {
                    position: status.position.printable(),
                    call: status.call.as_deref().map(printable_text),
                    ..status
                },
            },
            Self::Failed { cause, position } => Self::Failed {
                cause: FailureCause {
                    message: printable_text(&cause.message),
                    ..cause
                },
                position: position.printable(),
            },
            Self::Post { .. }
            | Self::Read { .. }
            | Self::FindMissing { .. }
            | Self::FindReturned { .. }
            | Self::Returned(_) => self,
        }
    }
}

impl Message for CoordinatorMessage {
    fn printable(self) -> Self {
        match self {
            Self::Refused(reason) => Self::Refused(printable_text(&reason)),
            Self::MissingRanks { call, found } => {
                let calls = found.calls.into_iter();
                let calls = calls.map(|(call, ranks)| (printable_text(&call), ranks));
                let found = MissingRanks {
                    calls: calls.collect(),
                    ..found
                };
                Self::MissingRanks { call, found }
            }
            Self::Lost(reason) => Self::Lost(printable_text(&reason)),
            Self::Failure(report) => Self::Failure(FailureReport {
                message: printable_text(&report.message),
                positions: printable_text(&report.positions),
                ..report
            }),
            Self::AllJoined
            | Self::Heartbeat
            | Self::Posted { .. }
            | Self::QueryStatus { .. }
            | Self::ReturnedBefore { .. }
            | Self::Returned(_)
            | Self::AllReturned
            | Self::Stop
            | Self::Relay { .. } => self,
        }
    }
}

impl RankPosition {
    pub(super) fn printable(self) -> Self {
        let boxed = |last: Box<Self>| Box::new(last.printable());
        match self {
            Self::Waiting(call) => Self::Waiting(printable_text(&call)),
            Self::Completed(call) => Self::Completed(printable_text(&call)),
            Self::Started(call) => Self::Started(printable_text(&call)),
            Self::Failed(last) => Self::Failed(boxed(last)),
            Self::NoHeartbeat(seconds, last) => Self::NoHeartbeat(seconds, boxed(last)),
            Self::Exited(last) => Self::Exited(boxed(last)),
            Self::NoCalls | Self::Returned | Self::NeverJoined => self,
        }
    }
}

/// Writes one line.
pub(super) fn write(to: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    to.write_all(&line)
}

/// Reads one line; `None` if the connection is closed.
pub(super) fn read<T: Message>(from: &mut impl BufRead) -> io::Result<Option<T>> {
    let mut line = Vec::new();
    from.by_ref()
        .take(MAX_LINE_BYTES)
        .read_until(b'\n', &mut line)?;
    match line.last() {
        None => Ok(None),
        Some(b'\n') => Ok(Some(serde_json::from_slice::<T>(&line)?.printable())),
        // Truncated, or longer than the limit.
        Some(_) => Err(io::ErrorKind::UnexpectedEof.into()),
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
        let mut lines = Vec::new();
        messages.iter().for_each(|m| write(&mut lines, m).unwrap());
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
