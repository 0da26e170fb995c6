//! Waiting in tests, without a verdict that depends on how busy a machine is.

use std::thread;
use std::time::{Duration, Instant};

/// How long [`wait_until`] waits: longer than any machine is busy.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// Returns as soon as the condition holds.
///
/// # Panics
///
/// If it does not hold within [`TIMEOUT`]; `what` names it in the message.
#[track_caller]
pub fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < TIMEOUT, "not within {TIMEOUT:?}: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}
