//! An environment variable that disables the verification of device results at the start of a run.

use std::env;

/// The name of an environment variable. If the variable is set to 1, a run does not compare the results of its devices
/// with a reference at the start. Use it only to measure the host code with a device driver that computes nothing.
pub const UNCHECKED: &str = "BURN_MEGATRON_UNCHECKED_DEVICE";

/// Returns whether the environment variable [`UNCHECKED`] is set to 1. In this case, wrong results of a device are not
/// detected.
pub fn is_unchecked() -> bool {
    env::var_os(UNCHECKED).is_some_and(|value| value == "1")
}
