//! Devices whose results are not compared with a reference.

use std::env;

/// The environment variable that, set to 1, skips the checks of a device's results at the start of a run. It is meant
/// for drivers that compute nothing, to measure only the host.
pub const UNCHECKED: &str = "BURN_MEGATRON_UNCHECKED_DEVICE";

/// Returns whether [`UNCHECKED`] is set to 1, so that results may be wrong.
pub fn is_unchecked() -> bool {
    env::var_os(UNCHECKED).is_some_and(|value| value == "1")
}
