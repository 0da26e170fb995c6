//! What a process does when its world has failed.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use super::{DEPARTURE, Seat};
use crate::log::{self, Header};
use crate::process::Desk;
use crate::rendezvous::Failure;
use crate::world::WorldError;
use crate::world::error::log_line;
use crate::world::rank::LogFolder;

/// How long a rank may go on after another has failed.
const GRACE: Duration = Duration::from_secs(5);

/// Waits for the world to fail: the launcher may end this process moments later, so what is to be written
/// and told is written and told at once, whatever the rank is doing.
pub(super) struct Watch {
    /// Whether the rank has ended.
    pub ended: Arc<AtomicBool>,
    /// The call log, or why it could not be written.
    call_log: Receiver<Result<PathBuf, String>>,
}

impl Watch {
    pub fn start(seat: &Seat, log_folder: &Arc<LogFolder>) -> std::io::Result<Self> {
        let (written, call_log) = mpsc::channel();
        let watch = Self {
            ended: Arc::default(),
            call_log,
        };
        let (world, desk) = (seat.world.clone(), seat.desk.clone());
        let (log_folder, ended) = (log_folder.clone(), watch.ended.clone());
        let (rank, size, launched) = (seat.rank, seat.size, seat.launched);
        let work = move || {
            let Some(failure) = world.member().await_end() else {
                return;
            };
            world.transport().abort();
            let call_log = write_log(&failure, size, rank, &desk, &log_folder);
            if tells(rank, launched, world.member().is_lost()) {
                tell(&failure, &call_log);
            }
            // Nobody listens if the rank has ended by itself.
            let _ = written.send(call_log);
            end_after(GRACE, &ended);
        };
        let builder = thread::Builder::new().name("watch".into());
        builder.spawn(work).map(|_| watch)
    }

    /// The call log, once it is written.
    pub fn call_log(&self) -> Result<PathBuf, String> {
        let written = self.call_log.recv_timeout(DEPARTURE);
        written.unwrap_or_else(|_| Err("it was not written in time".into()))
    }
}

/// Ends this process if its rank goes on for so long.
fn end_after(grace: Duration, ended: &AtomicBool) {
    let until = Instant::now() + grace;
    while Instant::now() < until {
        if ended.load(Ordering::Acquire) {
            return;
        }
        thread::sleep(Duration::from_millis(20));
    }
    process::exit(i32::from(WorldError::PEER));
}

/// Whether this process tells a person of the failure: the one that holds the rendezvous does, as a
/// launcher does by itself; where that one is gone, the next rank.
pub(super) fn tells(rank: usize, launched: bool, lost: bool) -> bool {
    match (launched, lost) {
        (true, false) => false,
        (true, true) | (false, false) => rank == 0,
        (false, true) => rank == 1,
    }
}

fn tell(failure: &Failure, call_log: &Result<PathBuf, String>) {
    let Failure {
        rank,
        message,
        verdict,
    } = failure;
    let log = log_line(call_log);
    let text = format!("error: rank {rank} failed: {message}\n{verdict}\n{log}\n");
    // In one piece: others write to the same terminal. Whether anybody reads it is not for this process.
    let _ = io::stderr().write_all(text.as_bytes());
}

fn write_log(
    failure: &Failure,
    size: usize,
    rank: usize,
    desk: &Desk,
    folder: &LogFolder,
) -> Result<PathBuf, String> {
    let header = Header {
        world: size,
        failed_rank: failure.rank,
        message: &failure.message,
        verdict: &failure.verdict,
    };
    let (folder, records) = (folder.path(), desk.journal().records());
    log::write(&folder, Some(rank), &header, records.into_iter())
        .map_err(|error| format!("{}: {error}", folder.display()))
}
