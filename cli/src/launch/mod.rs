//! `burn-megatron launch`: ranks as processes of this machine, or of several.
//!
//! Between the launcher and each rank stands a *keeper*, a process of this same program: it starts the
//! rank, sends its output over a connection, tells how it ended, and ends it when the launcher is gone.
//! The keepers are children of the launcher or of mpirun, and everything else is the same both ways.

pub mod args;

#[cfg(unix)]
mod ending;
#[cfg(unix)]
mod error;
#[cfg(unix)]
mod frame;
#[cfg(unix)]
mod hub;
#[cfg(unix)]
pub mod keeper;
#[cfg(unix)]
mod mpirun;
#[cfg(unix)]
mod output;
#[cfg(unix)]
mod plan;
#[cfg(unix)]
mod program;
#[cfg(unix)]
mod run;
#[cfg(unix)]
mod start;
#[cfg(unix)]
mod supervise;
#[cfg(unix)]
mod sys;
#[cfg(all(test, unix))]
mod tests;
#[cfg(unix)]
mod watch;

#[cfg(unix)]
pub use run::run;
#[cfg(unix)]
use run::{keeper_command, say};

#[cfg(not(unix))]
pub use missing::run;

/// What there is on systems without process groups.
#[cfg(not(unix))]
mod missing {
    use std::process::ExitCode;

    use crate::recipe::Error;

    /// Says that there is no launcher here.
    pub fn run<T>(_: &T) -> Result<ExitCode, Error> {
        Err("launch is not supported on this system; Linux and macOS have it".into())
    }
}

/// The hidden command of the launcher, which is missing as well.
#[cfg(not(unix))]
pub mod keeper {
    pub use super::missing::run;
}
