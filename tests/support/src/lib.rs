//! Helpers for the tests of several crates: temporary folders, waits, and messages of skipped tests.

mod folder;
mod skip;
mod wait;

pub use folder::TestFolder;
pub use skip::{Skip, skipped, skipped_in_part};
pub use wait::{TIMEOUT, wait_until};
