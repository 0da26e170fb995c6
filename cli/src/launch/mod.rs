//! `burn-megatron launch`: ranks as processes of this machine, or of several.
//!
//! Each rank is started by an *agent*, a process of this program between the launcher and the rank: it forwards the
//! rank's output over a connection, reports its exit status, and kills it when the launcher is gone. The agents are
//! children of the launcher or of mpirun; everything else is the same in both cases.

pub mod args;

#[cfg(unix)]
pub mod agent;
#[cfg(unix)]
mod agent_server;
#[cfg(unix)]
mod error;
#[cfg(unix)]
mod exit_status;
#[cfg(unix)]
mod monitor;
#[cfg(unix)]
mod mpirun;
#[cfg(unix)]
mod output;
#[cfg(unix)]
mod plan;
#[cfg(unix)]
mod program;
#[cfg(unix)]
mod protocol;
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
pub use run::run;
#[cfg(unix)]
use run::{agent_command, print_line};

#[cfg(not(unix))]
pub use missing::run;

/// Stands in on systems without process groups.
#[cfg(not(unix))]
mod missing {
    use std::process::ExitCode;

    use crate::error::Error;

    /// Fails: there is no launcher on this system.
    pub fn run<T>(_: &T) -> Result<ExitCode, Error> {
        Err("launch is not supported on this system: expected Linux or macOS".into())
    }
}

/// The hidden command, which is missing as well.
#[cfg(not(unix))]
pub mod agent {
    pub use super::missing::run;
}
