//! What ends a process some of whose ranks, which are threads, go on after one has failed.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::process;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use super::rank::LogFolder;
use super::threads::report;
use crate::log::{Position, verdict_among};
use crate::threads::WorldState;

/// A rank has come to its end.
pub(super) struct Ended {
    pub rank: usize,
    pub failed: bool,
}

/// Watches until the ranks have ended, or one has failed and others go on for so long.
pub(super) fn start(
    grace: Duration,
    size: usize,
    state: &Arc<WorldState>,
    log_folder: &Arc<LogFolder>,
    ends: Receiver<Ended>,
) -> io::Result<()> {
    let (state, log_folder) = (Arc::clone(state), Arc::clone(log_folder));
    let work = move || {
        let Some(running) = outlasting(grace, size, &ends) else {
            return;
        };
        // Whoever takes the failure reports it: the ranks may all have ended in this moment.
        let Some(failure) = state.take_failure() else {
            return;
        };
        let error = report(size, &state, failure, &log_folder);
        let stand = |rank: &usize| (*rank, state.journal(*rank).position());
        let stand: Vec<(usize, Position)> = running.iter().map(stand).collect();
        let text = format!(
            "error: {error}\nnot ended within {} s: {}; a thread cannot be stopped, so this process ends\n",
            grace.as_secs_f64(),
            verdict_among(&stand),
        );
        // In one piece, and whether anybody reads it is not for this process.
        let _ = io::stderr().write_all(text.as_bytes());
        process::exit(i32::from(error.exit_code()));
    };
    let builder = thread::Builder::new().name("watchdog".into());
    builder.spawn(work).map(drop)
}

/// Waits for the end that [`start`] has begun.
pub(super) fn await_end() -> ! {
    loop {
        thread::park();
    }
}

/// The ranks that go on when the grace is over; none where all have ended before.
fn outlasting(grace: Duration, size: usize, ends: &Receiver<Ended>) -> Option<Vec<usize>> {
    let mut running: BTreeSet<usize> = (0..size).collect();
    let mut until: Option<Instant> = None;
    loop {
        let end = match until {
            None => ends.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(until) => ends.recv_timeout(until.saturating_duration_since(Instant::now())),
        };
        match end {
            Ok(Ended { rank, failed }) => {
                running.remove(&rank);
                if failed {
                    until = until.or_else(|| Instant::now().checked_add(grace));
                }
            }
            // All have said their last word, and their threads are about to end.
            Err(RecvTimeoutError::Timeout) if running.is_empty() => until = None,
            Err(RecvTimeoutError::Timeout) => return Some(running.into_iter().collect()),
            Err(RecvTimeoutError::Disconnected) => return None,
        }
    }
}

#[cfg(test)]
#[path = "watchdog_tests.rs"]
mod tests;
