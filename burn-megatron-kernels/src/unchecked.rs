//! Devices whose results are not compared with anything.

use std::env;

/// The variable that, set to 1, skips the comparisons of a device's results at the start of a run. For drivers that compute
/// nothing, on which only the host is timed.
pub const UNCHECKED: &str = "BURN_MEGATRON_UNCHECKED_DEVICE";

/// Whether [`UNCHECKED`] is set to 1, so that results may be wrong.
pub fn is_unchecked() -> bool {
    env::var_os(UNCHECKED).is_some_and(|value| value == "1")
}
