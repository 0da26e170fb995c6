//! Tests `burn-megatron launch` with real processes, as children of the launcher and through mpirun.
//!
//! The ranks are shell scripts. Each run sets an environment variable that all of its processes inherit, so that
//! leftover processes can be counted.
#![cfg(target_os = "linux")]

mod ends;
mod output;
mod restarts;
mod run;
mod signals;
mod start;
