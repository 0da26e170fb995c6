//! Implements `burn-megatron launch`, which starts ranks as processes on this machine.
//!
//! Every rank is a child of the launcher with its own process group, and its output is read through pipes. A guard
//! process kills these groups when the launcher dies. For MPI, the launcher also starts mpirun, which sets the
//! variables through which the ranks find each other: see [`slot`]. With `--max-restarts`, a job whose ranks failed
//! is started again in a new world.

pub mod args;

#[cfg(unix)]
mod error;
#[cfg(unix)]
mod exit_status;
#[cfg(unix)]
mod guard;
#[cfg(unix)]
mod mpirun;
#[cfg(unix)]
mod mpirun_messages;
#[cfg(unix)]
mod output;
#[cfg(unix)]
mod plan;
#[cfg(unix)]
mod processes;
#[cfg(unix)]
mod program;
#[cfg(unix)]
mod restart;
#[cfg(unix)]
mod run;
#[cfg(unix)]
mod signals;
#[cfg(unix)]
pub mod slot;
#[cfg(unix)]
mod supervise;
#[cfg(unix)]
mod sys;
#[cfg(all(test, unix))]
mod tests;
#[cfg(unix)]
mod world;

#[cfg(unix)]
pub use run::run;

#[cfg(not(unix))]
pub use missing::run;

/// Replacement for systems without process groups.
#[cfg(not(unix))]
mod missing {
    use std::process::ExitCode;

    use crate::error::Error;
    use crate::family::Families;

    /// Returns an error, because the launcher does not support this system.
    pub fn run<T>(_: &T, _: &Families, _: &str) -> Result<ExitCode, Error> {
        Err("launch is not supported on this system: expected Linux or macOS".into())
    }
}
