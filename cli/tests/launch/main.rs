//! `burn-megatron launch` with real processes, started both ways: as its own children and through mpirun.
//!
//! The ranks are shell scripts. Each run puts a value of its own into the environment, which all that it
//! starts inherits, so that what is left running can be counted.
#![cfg(target_os = "linux")]

mod ends;
mod output;
mod run;
mod signals;
mod start;
