//! Fuzz targets: parsers of untrusted bytes.
//!
//! `tools/fuzz/` has a cargo-fuzz target for each parser. `tests/fuzz.rs` runs each target for a short time on
//! [mutations](Mutations) of its seeds. A target must not panic, and its allocations must be proportional to the
//! length of the input.

mod mutations;
mod targets;

pub use mutations::Mutations;
pub use targets::TARGETS;

/// A fuzz target.
pub struct Target {
    /// The name of the target. It is the name of its file in `tools/fuzz/fuzz_targets`.
    pub name: &'static str,
    /// Valid inputs.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Parses an input. Returns whether the input was valid.
    pub run: fn(&[u8]) -> bool,
}

/// Runs the target with this name.
///
/// # Panics
///
/// Panics if the target does not exist, or if the target panics.
pub fn run(name: &str, input: &[u8]) {
    let target = TARGETS.iter().find(|target| target.name == name);
    let target = target.unwrap_or_else(|| panic!("there is no target {name}"));
    (target.run)(input);
}
