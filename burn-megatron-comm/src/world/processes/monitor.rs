//! The monitor that reacts to a failure of the world: it aborts calls, writes the call log, and ends the process.

use std::io;
use std::path::PathBuf;
use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use super::{DISCONNECT_TIMEOUT, ProcessRank};
use crate::world::WorldError;
use crate::world::error::{log_line, print_whole};
use crate::world::rank::CallLogDir;

/// The time for which a rank may continue to run after another rank has failed.
const GRACE: Duration = Duration::from_secs(5);

/// A thread that waits for a failure of the world. The thread writes the call log and prints the error immediately,
/// even if the rank is busy, because the launcher may kill this process soon.
pub(super) struct FailureMonitor {
    /// Whether the rank has ended.
    pub ended: Arc<AtomicBool>,
    /// A channel that receives the path of the call log, or the reason why it could not be written.
    call_log: Receiver<Result<PathBuf, String>>,
}

impl FailureMonitor {
    pub fn start(rank: &ProcessRank, call_log_dir: &Arc<CallLogDir>) -> io::Result<Self> {
        let (written, call_log) = mpsc::channel();
        let monitor = Self {
            ended: Arc::default(),
            call_log,
        };
        let (world, tracker) = (rank.world.clone(), rank.tracker.clone());
        let (call_log_dir, ended) = (call_log_dir.clone(), monitor.ended.clone());
        let (rank, size, launched) = (rank.rank, rank.size, rank.launched);
        let work = move || {
            let Some(failure) = world.rendezvous.await_end() else {
                return;
            };
            world.transport.abort();
            let records = tracker.recorder().records();
            let call_log = call_log_dir.write(Some(rank), size, &failure, records);
            if is_reporter(rank, launched, world.rendezvous.is_lost()) {
                print_whole(&format!("error: {failure}\n{}\n", log_line(&call_log)));
            }
            // There is no receiver if the rank has already ended.
            let _ = written.send(call_log);
            exit_after(GRACE, &ended);
        };
        let builder = thread::Builder::new().name("watch".into());
        builder.spawn(work).map(|_| monitor)
    }

    /// Waits for the call log and returns its path.
    pub fn call_log(&self) -> Result<PathBuf, String> {
        let written = self.call_log.recv_timeout(DISCONNECT_TIMEOUT);
        written.unwrap_or_else(|_| Err("it was not written in time".into()))
    }
}

/// Exits this process if its rank has not ended within the grace period.
fn exit_after(grace: Duration, ended: &AtomicBool) {
    let until = Instant::now() + grace;
    while Instant::now() < until {
        if ended.load(Ordering::Acquire) {
            return;
        }
        thread::sleep(Duration::from_millis(20));
    }
    process::exit(i32::from(WorldError::EXIT_PEER_FAILED));
}

/// Returns whether this process prints the failure. If a launcher hosts the rendezvous, the launcher prints the
/// failure, or rank 0 if the launcher is lost. Otherwise, rank 0 hosts the rendezvous and prints the failure, or rank 1
/// if rank 0 is lost.
pub(super) fn is_reporter(rank: usize, launched: bool, lost: bool) -> bool {
    match (launched, lost) {
        (true, false) => false,
        (true, true) | (false, false) => rank == 0,
        (false, true) => rank == 1,
    }
}
