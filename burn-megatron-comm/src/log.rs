//! The recent calls of each rank, and who stands where when something fails.

use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::buffer::DType;
use super::call::{Call, Operation, Signature};
use super::communicator::Group;
use super::error::{list_ranks, ranks_verb};

/// The number of calls that each rank remembers.
pub const CALLS_KEPT: usize = 2000;

/// One call of one rank. A line of the call log is this record as JSON.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CallRecord {
    /// The world rank that made the call.
    pub rank: usize,
    /// The step it was made in, where the program says so: see
    /// [`Communicator::begin_step`](super::Communicator::begin_step).
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
    /// The elements that the rank gave, or for a receive those that it expects.
    pub len: usize,
    /// The type of the elements.
    pub dtype: DType,
    /// When the call was started, in seconds since the world began.
    pub started: f64,
    /// When its result was there, in seconds since the world began; `None` if that has not happened.
    pub completed: Option<f64>,
}

#[derive(Debug)]
struct Entry {
    sequence: u64,
    group: Arc<Group>,
    signature: Arc<Signature>,
    step: Option<u64>,
    started: Duration,
    completed: Option<Duration>,
}

impl Entry {
    fn record(&self) -> CallRecord {
        CallRecord {
            rank: self.group.world_rank(),
            step: self.step,
            sequence: self.sequence,
            group: self.group.name().to_owned(),
            ranks: list_ranks(self.group.ranks()),
            operation: self.signature.name(),
            call: self.signature.describe(&self.group),
            len: self.signature.len,
            dtype: self.signature.dtype,
            started: self.started.as_secs_f64(),
            completed: self.completed.map(|time| time.as_secs_f64()),
        }
    }

    fn describe(&self) -> String {
        let (sequence, call) = (self.sequence, self.signature.describe(&self.group));
        let unit = if self.is_message() { "message" } else { "call" };
        let step = match self.step {
            Some(step) => format!(" in step {step}"),
            None => String::new(),
        };
        format!("{unit} {sequence} {call} over {}{step}", self.group)
    }

    fn is_message(&self) -> bool {
        let operation = &self.signature.operation;
        matches!(
            operation,
            Operation::Call(Call::Send { .. } | Call::Receive { .. })
        )
    }
}

/// The ring of the recent calls of one rank.
#[derive(Debug, Default)]
pub(super) struct CallLog {
    entries: VecDeque<Entry>,
    /// The number of entries that have left the ring.
    forgotten: u64,
    /// Calls that the rank is blocked in, or was when they failed; the last one is where it stands.
    blocked: Vec<u64>,
}

impl CallLog {
    /// Notes a call and returns the key of its entry.
    pub fn start(
        &mut self,
        sequence: u64,
        group: &Arc<Group>,
        signature: Arc<Signature>,
        step: Option<u64>,
        now: Duration,
    ) -> u64 {
        if self.entries.len() == CALLS_KEPT {
            self.entries.pop_front();
            self.forgotten += 1;
        }
        let group = Arc::clone(group);
        self.entries.push_back(Entry {
            sequence,
            group,
            signature,
            step,
            started: now,
            completed: None,
        });
        self.forgotten + self.entries.len() as u64 - 1
    }

    /// Notes that the rank waits in a call.
    pub fn block(&mut self, key: u64) {
        self.blocked.retain(|blocked| *blocked >= self.forgotten);
        self.blocked.push(key);
    }

    /// Notes that a call has its result.
    pub fn complete(&mut self, key: u64, now: Duration) {
        self.blocked.retain(|blocked| *blocked != key);
        let index = key.checked_sub(self.forgotten);
        if let Some(entry) = index.and_then(|index| self.entries.get_mut(index as usize)) {
            entry.completed.get_or_insert(now);
        }
    }

    /// The recent calls, the oldest first.
    pub fn records(&self) -> Vec<CallRecord> {
        self.entries.iter().map(Entry::record).collect()
    }

    fn blocked_in(&self) -> Option<&Entry> {
        let index = self.blocked.last()?.checked_sub(self.forgotten)?;
        self.entries.get(index as usize)
    }

    /// What was called as collective `sequence` of a group.
    pub fn call_of(&self, group: &Group, sequence: u64) -> Option<String> {
        let same = |entry: &&Entry| {
            let of_group =
                entry.group.name() == group.name() && entry.group.ranks() == group.ranks();
            of_group && entry.sequence == sequence && !entry.is_message()
        };
        let entry = self.entries.iter().rev().find(same)?;
        Some(entry.signature.describe(&entry.group))
    }

    /// Where the rank stands, as a clause that follows `"rank 3"` (or `"ranks 0, 1"`) and a verb.
    pub fn position(&self) -> Position {
        if let Some(entry) = self.blocked_in() {
            return Position::At(entry.describe());
        }
        match self.entries.back() {
            None => Position::Nowhere,
            Some(entry) if entry.completed.is_some() => Position::Past(entry.describe()),
            Some(entry) => Position::Started(entry.describe()),
        }
    }
}

/// Where a rank stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Position {
    /// It waits in a call.
    At(String),
    /// It has completed this call and is in code of its own.
    Past(String),
    /// It has started this call, not waited for it, and is in code of its own.
    Started(String),
    /// It has made no call.
    Nowhere,
    /// Its closure has returned.
    Returned,
    /// Its closure has failed, having stood there.
    Failed(Box<Position>),
    /// Its process has said nothing for so many seconds; when last heard of, it stood there.
    Silent(u64, Box<Position>),
    /// Its process has ended; when last heard of, it stood there.
    Gone(Box<Position>),
    /// It has never come.
    Absent,
}

impl Position {
    fn clause(&self, ranks: &[usize]) -> String {
        let verb = |singular, plural| ranks_verb(ranks, singular, plural);
        match self {
            Position::At(call) => format!("{} at {call}", verb("is", "are")),
            Position::Past(call) => format!("{} past {call}", verb("is", "are")),
            Position::Started(call) => format!("{} started {call}", verb("has", "have")),
            Position::Nowhere => format!("{} made no call", verb("has", "have")),
            Position::Returned => verb("has returned", "have returned"),
            Position::Failed(stood) => match &**stood {
                Position::At(call) => verb("failed at", "failed at") + " " + call,
                Position::Past(call) => verb("failed past", "failed past") + " " + call,
                Position::Started(call) => verb("failed", "failed") + " having started " + call,
                _ => verb("failed before any call", "failed before any call"),
            },
            Position::Silent(seconds, stood) => {
                let heard = verb("has not been heard of for", "have not been heard of for");
                format!("{heard} {seconds} s, {}", stood.last_seen())
            }
            Position::Gone(stood) => {
                let ended = verb("has ended without a word", "have ended without a word");
                format!("{ended}, {}", stood.last_seen())
            }
            Position::Absent => verb("has never come", "have never come"),
        }
    }
}

impl Position {
    /// Where a rank was that is not there any more.
    fn last_seen(&self) -> String {
        match self {
            Position::At(call) => format!("last seen at {call}"),
            Position::Past(call) => format!("last seen past {call}"),
            Position::Started(call) => format!("last seen having started {call}"),
            _ => "last seen before any call".into(),
        }
    }
}

/// Where one rank stands.
pub(super) fn verdict_of(rank: usize, position: &Position) -> String {
    position.clause(&[rank])
}

/// One line that says who stands where; ranks that stand together share a clause.
pub(super) fn verdict(positions: &[Position]) -> String {
    let all: Vec<_> = positions.iter().cloned().enumerate().collect();
    verdict_among(&all)
}

/// The same for some of the ranks.
pub(super) fn verdict_among(positions: &[(usize, Position)]) -> String {
    let mut places: Vec<(&Position, Vec<usize>)> = Vec::new();
    for (rank, position) in positions {
        match places.iter_mut().find(|(place, _)| *place == position) {
            Some((_, ranks)) => ranks.push(*rank),
            None => places.push((position, vec![*rank])),
        }
    }
    let clauses: Vec<String> = places
        .iter()
        .map(|(position, ranks)| position.clause(ranks))
        .collect();
    clauses.join("; ")
}

/// The first line of a call log.
#[derive(Serialize)]
pub(super) struct Header<'a> {
    /// The number of ranks.
    pub world: usize,
    pub failed_rank: usize,
    pub message: &'a str,
    pub verdict: &'a str,
}

/// Writes a header line and then one line per call into a new file of `folder`; of all ranks, or of one.
pub(super) fn write(
    folder: &Path,
    rank: Option<usize>,
    header: &Header<'_>,
    records: impl Iterator<Item = CallRecord>,
) -> io::Result<PathBuf> {
    fs::create_dir_all(folder)?;
    let (path, file) = create(folder, rank)?;
    let mut out = BufWriter::new(file);
    serde_json::to_writer(&mut out, header)?;
    writeln!(out)?;
    for record in records {
        serde_json::to_writer(&mut out, &record)?;
        writeln!(out)?;
    }
    out.flush()?;
    Ok(path)
}

/// A file that did not exist before: several worlds may fail in the same moment.
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
