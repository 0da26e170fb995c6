//! The record of a call, and the file with the calls before a failure.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process;
use std::time::SystemTime;

use burn_megatron_rendezvous::FailureReport;
use serde::Serialize;

use crate::buffer::DType;

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
