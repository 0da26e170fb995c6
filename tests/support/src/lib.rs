//! What the tests of several crates share: temporary folders, waits, and tests that say that they could not run.

mod folder;
mod skip;
mod wait;

pub use folder::TestFolder;
pub use skip::{Skip, skipped, skipped_in_part};
pub use wait::{TIMEOUT, wait_until};
