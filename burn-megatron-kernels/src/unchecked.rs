//! Devices whose results are not verified against a reference.

use std::env;

/// The name of an environment variable. If it is set to 1, a run does not verify the results of its devices at the
/// start. It is meant for measurements of the host with a driver that computes nothing.
pub const UNCHECKED: &str = "BURN_MEGATRON_UNCHECKED_DEVICE";

/// Returns whether [`UNCHECKED`] is set to 1. In this case the results may be wrong.
pub fn is_unchecked() -> bool {
    env::var_os(UNCHECKED).is_some_and(|value| value == "1")
}
