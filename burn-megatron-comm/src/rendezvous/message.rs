//! What the ranks and the coordinator tell each other: one JSON value per line.

use std::io::{self, BufRead, Read, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::auth::{printable_name, printable_text};
use crate::log::Position;

/// The longest line that is read.
const LONGEST: u64 = 16 << 20;

/// A message, of which nothing is printed that a terminal would obey.
pub(super) trait Message: DeserializeOwned {
    /// The same with its texts made [printable](printable_text).
    fn printable(self) -> Self;
}

/// What a rank says after its [`Hello`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Up {
    /// It lives, and stands there.
    Alive(Position),
    /// Keep this for whoever reads it.
    Post { key: String, value: Vec<u8> },
    /// Send this as soon as somebody has posted it.
    Read { key: String },
    /// Who has not come to this call?
    Where { question: u64, call: CallOf },
    /// An answer to [`Down::Ask`].
    Stands { question: u64, stand: Stand },
    /// It has failed, having stood there.
    Failed { cause: Cause, stood: Position },
    /// Its closure has returned, having made so many collectives on each of its groups.
    Returned(Vec<(u64, u64)>),
}

/// Who a rank is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Hello {
    /// The version of this library.
    pub version: String,
    pub rank: usize,
    pub size: usize,
    /// The number of the world, if its ranks were told one.
    pub world: u64,
    /// Where it runs, for messages.
    pub host: String,
    pub process: u32,
    /// How many seconds it waits for all to come, from now on.
    pub gather: f64,
    /// After how many seconds without a sign of life another counts as lost.
    pub silence: f64,
}

/// A collective, by the number of its group and its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CallOf {
    pub group: u64,
    pub sequence: u64,
}

/// Where a rank stands when it is asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Stand {
    pub position: Position,
    /// Whether it is no member of the group, or has come to the call that it was asked about.
    pub came: bool,
    /// What it called there.
    pub call: Option<String>,
}

/// Why a rank failed, as it sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Cause {
    pub kind: CauseKind,
    pub message: String,
}

/// The more telling one comes first: what failed at the same time may be a consequence of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum CauseKind {
    /// Its process has ended without a word.
    Gone,
    /// An error or a panic of its own.
    Own,
    /// Its process says nothing any more.
    Silent,
    /// Ranks that disagree.
    Disagreement,
    /// Others did not come.
    Waited,
    /// The transport reports something.
    Transport,
}

/// What the coordinator says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Down {
    /// All ranks have come.
    Complete,
    /// This rank cannot take part.
    Refused(String),
    /// The coordinator lives.
    Alive,
    /// What was asked for by [`Up::Read`].
    Posted { key: String, value: Vec<u8> },
    /// Where do you stand?
    Ask { question: u64, call: Option<CallOf> },
    /// The answer to [`Up::Where`].
    Whereabouts { question: u64, found: Whereabouts },
    /// A rank has failed, and with it the world.
    Failure(Failure),
    /// A rank has returned; see [`Up::Returned`].
    Returned { rank: usize, calls: Vec<(u64, u64)> },
    /// All ranks have returned.
    AllReturned,
    /// End the step in hand, and stop.
    Stop,
}

/// Who has not come to a call, and what those who came have called.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Whereabouts {
    /// World ranks that are not there, or do not answer.
    pub absent: Vec<usize>,
    /// World ranks that are there, with their calls.
    pub calls: Vec<(usize, String)>,
}

/// The end of a world.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Failure {
    /// The rank that failed first, or with the most telling cause.
    pub rank: usize,
    /// What it failed with.
    pub message: String,
    /// One line that says where each rank stood.
    pub verdict: String,
}

impl Hello {
    /// The hello of a rank, with its names made [printable](printable_name).
    pub fn read(text: &str) -> Result<Self, serde_json::Error> {
        let hello: Self = serde_json::from_str(text)?;
        Ok(Self {
            version: printable_name(&hello.version),
            host: printable_name(&hello.host),
            ..hello
        })
    }
}

impl Message for Up {
    fn printable(self) -> Self {
        match self {
            Self::Alive(position) => Self::Alive(position.printable()),
            Self::Stands { question, stand } => Self::Stands {
                question,
                stand: Stand {
                    position: stand.position.printable(),
                    call: stand.call.as_deref().map(printable_text),
                    ..stand
                },
            },
            Self::Failed { cause, stood } => Self::Failed {
                cause: Cause {
                    message: printable_text(&cause.message),
                    ..cause
                },
                stood: stood.printable(),
            },
            Self::Post { .. } | Self::Read { .. } | Self::Where { .. } | Self::Returned(_) => self,
        }
    }
}

impl Message for Down {
    fn printable(self) -> Self {
        match self {
            Self::Refused(reason) => Self::Refused(printable_text(&reason)),
            Self::Whereabouts { question, found } => {
                let calls = found.calls.into_iter();
                let calls = calls.map(|(rank, call)| (rank, printable_text(&call)));
                let found = Whereabouts {
                    calls: calls.collect(),
                    ..found
                };
                Self::Whereabouts { question, found }
            }
            Self::Failure(failure) => Self::Failure(Failure {
                message: printable_text(&failure.message),
                verdict: printable_text(&failure.verdict),
                ..failure
            }),
            Self::Complete
            | Self::Alive
            | Self::Posted { .. }
            | Self::Ask { .. }
            | Self::Returned { .. }
            | Self::AllReturned
            | Self::Stop => self,
        }
    }
}

impl Position {
    fn printable(self) -> Self {
        let within = |stood: Box<Self>| Box::new(stood.printable());
        match self {
            Self::At(call) => Self::At(printable_text(&call)),
            Self::Past(call) => Self::Past(printable_text(&call)),
            Self::Started(call) => Self::Started(printable_text(&call)),
            Self::Failed(stood) => Self::Failed(within(stood)),
            Self::Silent(seconds, stood) => Self::Silent(seconds, within(stood)),
            Self::Gone(stood) => Self::Gone(within(stood)),
            Self::Nowhere | Self::Returned | Self::Absent => self,
        }
    }
}

/// Writes one line.
pub(super) fn write(to: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    to.write_all(&line)
}

/// Reads one line; nothing if the other side has closed.
pub(super) fn read<T: Message>(from: &mut impl BufRead) -> io::Result<Option<T>> {
    let mut line = Vec::new();
    from.by_ref().take(LONGEST).read_until(b'\n', &mut line)?;
    match line.last() {
        None => Ok(None),
        Some(b'\n') => Ok(Some(serde_json::from_slice::<T>(&line)?.printable())),
        // Cut off, or longer than anything a rank says.
        Some(_) => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_as_they_were_written() {
        let said = [
            Up::Alive(Position::At("call 3 barrier over world [0]".into())),
            Up::Post {
                key: "id".into(),
                value: vec![0, 10, 255],
            },
            Up::Returned(vec![(0, 7), (u64::MAX, 1)]),
        ];
        let mut wire = Vec::new();
        said.iter().for_each(|m| write(&mut wire, m).unwrap());
        let mut from = wire.as_slice();
        for message in &said {
            assert_eq!(read::<Up>(&mut from).unwrap().as_ref(), Some(message));
        }
        assert_eq!(read::<Up>(&mut from).unwrap(), None);
    }

    #[test]
    fn what_is_no_message_is_an_error() {
        for text in ["GET / HTTP/1.1\r\n", "{\"Alive\":\"Nowhere\"", "{}\n"] {
            assert!(read::<Up>(&mut text.as_bytes()).is_err(), "{text}");
        }
    }
}
