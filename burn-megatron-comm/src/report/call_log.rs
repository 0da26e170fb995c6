//! The records of calls, and the file that lists the calls before a failure.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process;
use std::time::SystemTime;

use burn_megatron_rendezvous::FailureReport;
use serde::Serialize;

use crate::buffer::DType;

/// The number of recent calls of each rank that are recorded.
pub const CALLS_KEPT: usize = 2000;

/// The record of one collective, send or receive of one rank. Each line of the call log after the header is such a
/// record in JSON format.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CallRecord {
    /// The world rank that issued the call.
    pub rank: usize,
    /// The training step in which the call was issued, or `None` if the program does not set the step with
    /// [`Communicator::begin_step`](crate::Communicator::begin_step).
    pub step: Option<u64>,
    /// The sequence number of the call in the group, counted from 0. Messages are counted separately for each pair of
    /// ranks.
    pub sequence: u64,
    /// The name of the group.
    pub group: String,
    /// The world ranks of the group, in group order.
    pub ranks: String,
    /// The name of the operation, for example `"all_gather"`.
    pub operation: &'static str,
    /// The call with its length and type, for example `"all_gather of 4096 f32"`.
    pub call: String,
    /// The number of elements of the rank's input. For a receive, the number of elements that are expected.
    pub len: usize,
    /// The type of the elements.
    pub dtype: DType,
    /// The time at which the call was started, in seconds since the start of the world.
    pub started: f64,
    /// The time at which the call completed, in seconds since the start of the world. `None` if the call has not
    /// completed.
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

/// Writes a new file in `folder`. The first line describes the failure of a world of `world` ranks. Each following line
/// is the record of one call. `rank` is the rank whose calls are written, or `None` for the calls of all ranks.
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

/// Creates a file with a new name, because several worlds may fail at the same time.
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
