//! A watchdog that ends the process if its ranks are threads and continue to run after another rank has failed.

use std::collections::BTreeSet;
use std::io;
use std::process;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use super::error::print_whole;
use super::rank::CallLogDir;
use super::threads::rank_failed;
use crate::engines::threads::WorldState;
use burn_megatron_rendezvous::{RankPosition, describe_some};

/// The message that a rank has ended.
pub(super) struct RankEnded {
    pub rank: usize,
    pub failed: bool,
}

/// Starts a thread that waits until all ranks have ended, or until the grace period after a failure is over.
pub(super) fn start(
    grace: Duration,
    size: usize,
    state: &Arc<WorldState>,
    call_log_dir: &Arc<CallLogDir>,
    ends: Receiver<RankEnded>,
) -> io::Result<()> {
    let (state, call_log_dir) = (Arc::clone(state), Arc::clone(call_log_dir));
    let work = move || {
        let Some(running) = running_after_grace(grace, size, &ends) else {
            return;
        };
        // Only one thread takes and reports the failure. All ranks may have ended in the meantime.
        let Some(failure) = state.take_failure() else {
            return;
        };
        let error = rank_failed(size, &state, failure, &call_log_dir);
        let position = |rank: &usize| (*rank, state.recorder(*rank).position());
        let positions: Vec<(usize, RankPosition)> = running.iter().map(position).collect();
        print_whole(&format!(
            "error: {error}\nstill running after {} s: {}; a thread cannot be stopped, so this process exits\n",
            grace.as_secs_f64(),
            describe_some(&positions),
        ));
        process::exit(i32::from(error.exit_code()));
    };
    let builder = thread::Builder::new().name("watchdog".into());
    builder.spawn(work).map(drop)
}

/// Blocks until the watchdog exits the process.
pub(super) fn wait_for_exit() -> ! {
    loop {
        thread::park();
    }
}

/// Returns the ranks that are still running at the end of the grace period. Returns `None` if all ranks ended earlier.
fn running_after_grace(
    grace: Duration,
    size: usize,
    ends: &Receiver<RankEnded>,
) -> Option<Vec<usize>> {
    let mut running: BTreeSet<usize> = (0..size).collect();
    let mut until: Option<Instant> = None;
    loop {
        let end = match until {
            None => ends.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(until) => ends.recv_timeout(until.saturating_duration_since(Instant::now())),
        };
        match end {
            Ok(RankEnded { rank, failed }) => {
                running.remove(&rank);
                if failed {
                    until = until.or_else(|| Instant::now().checked_add(grace));
                }
            }
            // All ranks have reported their end, and their threads are about to end.
            Err(RecvTimeoutError::Timeout) if running.is_empty() => until = None,
            Err(RecvTimeoutError::Timeout) => return Some(running.into_iter().collect()),
            Err(RecvTimeoutError::Disconnected) => return None,
        }
    }
}

#[cfg(test)]
#[path = "watchdog_tests.rs"]
mod tests;
