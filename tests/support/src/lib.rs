//! What the tests of several crates share: temporary folders, and tests that say that they could not run.

mod folder;
mod skip;

pub use folder::TestFolder;
pub use skip::{Skip, skipped, skipped_in_part};
