//! Waits in tests. The result of a test does not depend on the load of the machine.

use std::thread;
use std::time::{Duration, Instant};

/// The timeout of [`wait_until`]. It is long enough for a busy machine.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// Returns as soon as the condition holds.
///
/// # Panics
///
/// Panics if the condition does not hold within [`TIMEOUT`]. The message contains `what`.
#[track_caller]
pub fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < TIMEOUT, "not within {TIMEOUT:?}: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}
