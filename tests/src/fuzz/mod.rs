//! What reads bytes that anybody may have written, to be fuzzed.
//!
//! `tools/fuzz/` has a cargo-fuzz target for each; `tests/fuzz.rs` runs each for a short time, over
//! [mutations](Mutations) of its seeds. A target must return: no panic, and no allocation that the
//! input's length does not explain.

mod mutations;
mod targets;

pub use mutations::Mutations;
pub use targets::TARGETS;

/// Something that reads bytes.
pub struct Target {
    /// Its name, that of the file in `tools/fuzz/fuzz_targets`.
    pub name: &'static str,
    /// Inputs that it accepts, to begin with.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Reads an input, and says whether it was accepted.
    pub run: fn(&[u8]) -> bool,
}

/// Runs the target of this name.
///
/// # Panics
///
/// Where there is none, and where the target does.
pub fn run(name: &str, input: &[u8]) {
    let target = TARGETS.iter().find(|target| target.name == name);
    let target = target.unwrap_or_else(|| panic!("there is no target {name}"));
    (target.run)(input);
}
