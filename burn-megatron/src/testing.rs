//! What tests of several modules need.

use std::thread;
use std::time::{Duration, Instant};

/// Longer than any machine is busy: a wait of a test that lasts as long has failed.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until something has come about, however long a busy machine takes.
#[track_caller]
pub(crate) fn until(what: &str, holds: impl Fn() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < PATIENCE, "it never came about: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}
