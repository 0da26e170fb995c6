//! The record of a call, what each rank was doing when one failed, and the file with both.

use std::collections::HashMap;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use crate::buffer::DType;
use crate::error::ranks_verb;

/// The number of recent calls that each rank keeps.
pub const CALLS_KEPT: usize = 2000;

/// One call of one rank. A line of the call log is this record as JSON.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CallRecord {
    /// The world rank that made the call.
    pub rank: usize,
    /// The step it was made in, if the program sets it: see
    /// [`Communicator::begin_step`](crate::Communicator::begin_step).
    pub step: Option<u64>,
    /// The number of the call in the group, from 0; for a message, of the messages of the pair.
    pub sequence: u64,
    /// The name of the group.
    pub group: String,
    /// The world ranks of the group, in group order.
    pub ranks: String,
    /// The name of the operation, for example `"all_gather"`.
    pub operation: &'static str,
    /// The call with its shape and type, for example `"all_gather of 4096 f32"`.
    pub call: String,
    /// The elements of the rank's input; of a receive, those that it expects.
    pub len: usize,
    /// The type of the elements.
    pub dtype: DType,
    /// When the call was started, in seconds since the world began.
    pub started: f64,
    /// When it completed, in seconds since the world began; `None` if it has not.
    pub completed: Option<f64>,
}

/// The position of a rank: its current activity, or the activity that it last reported. Serialized names are the names
/// of the rendezvous' protocol.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum RankPosition {
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
    /// Its process has sent no heartbeat for so many seconds; with its last known position.
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
pub(crate) fn describe_rank(rank: usize, position: &RankPosition) -> String {
    position.clause(&[rank])
}

/// One line that describes what every rank is doing; ranks at the same position share a clause.
pub(crate) fn describe_ranks(positions: &[RankPosition]) -> String {
    let all: Vec<_> = positions.iter().cloned().enumerate().collect();
    describe_some(&all)
}

/// [`describe_ranks`] for some of the ranks.
pub(crate) fn describe_some(positions: &[(usize, RankPosition)]) -> String {
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
pub(crate) struct FailureReport {
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

/// The first line of a call log.
#[derive(Serialize)]
struct CallLogHeader<'a> {
    /// The number of ranks.
    world: usize,
    failed_rank: usize,
    message: &'a str,
    /// The position of every rank.
    #[serde(rename = "verdict")]
    positions: &'a str,
}

/// Writes the failure of a world of `world` ranks and then one line per call into a new file in `folder`. `rank` is
/// `None` for the calls of all ranks.
pub(crate) fn write(
    folder: &Path,
    rank: Option<usize>,
    world: usize,
    failure: &FailureReport,
    records: impl IntoIterator<Item = CallRecord>,
) -> io::Result<PathBuf> {
    fs::create_dir_all(folder)?;
    let (path, file) = create(folder, rank)?;
    let mut out = BufWriter::new(file);
    let header = CallLogHeader {
        world,
        failed_rank: failure.rank,
        message: &failure.message,
        positions: &failure.positions,
    };
    serde_json::to_writer(&mut out, &header)?;
    writeln!(out)?;
    for record in records {
        serde_json::to_writer(&mut out, &record)?;
        writeln!(out)?;
    }
    out.flush()?;
    Ok(path)
}

/// Creates a file with a new name: several worlds may fail at the same time.
fn create(folder: &Path, rank: Option<usize>) -> io::Result<(PathBuf, File)> {
    let time = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    let of = rank.map_or(String::new(), |rank| format!("rank-{rank}-"));
    for attempt in 0u64.. {
        let name = format!(
            "burn-megatron-calls-{of}{}-{}-{attempt}.jsonl",
            time.as_millis(),
            process::id()
        );
        let path = folder.join(name);
        match OpenOptions::new().write(true).create_new(true).open(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
            result => return result.map(|file| (path, file)),
        }
    }
    unreachable!("2^64 files of one name")
}
