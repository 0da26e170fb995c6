//! The engine whose ranks are processes under an MPI: for clusters of CPUs.
//!
//! Built with the feature `mpi`, against the MPI library of the system (its `mpicc` and libclang are needed
//! for that), and started by its `mpirun` or by a Slurm that knows it. Collectives are made of messages
//! from one rank to another, not of MPI's own, so that they are compared, ordered and reduced exactly as
//! among threads.
//!
//! One thread of the process makes all calls to MPI, so that any level of thread support will do. What MPI
//! reports becomes a [`CommError::Engine`] with the function and the rank at the
//! other end, except that an MPI that cannot start ends the process itself.
//!
//! That a process has died, MPI does not report: with Open MPI 4.1.4, messages to and from it are never
//! complete, over shared memory without a word, over TCP with a warning on the terminal, and no call
//! returns an error or ends the process. Its `mpirun` ends the other processes about a second later. Who
//! has died is found out by the heartbeats of the ranks.

mod raw;
#[cfg(test)]
mod tests;
mod wire;

use std::sync::Arc;
use std::time::Duration;

use super::error::CommError;
use super::exchange::Exchange;
use super::pool::BufferPool;
use wire::MpiWire;

/// The name of the engine.
const ENGINE: &str = "mpi";

/// The transport of one process under MPI.
pub(crate) type MpiTransport = Exchange;

impl MpiTransport {
    /// Starts MPI. All ranks of the world come here, once in the life of a process.
    ///
    /// # Errors
    /// [`CommError::Engine`] if MPI reports an error or was started before, or if it has not started
    /// within `patience`, for example because a rank has not come.
    pub fn open(pool: Arc<BufferPool>, patience: Duration) -> Result<Arc<Self>, CommError> {
        Self::launch(ENGINE, pool, patience, || {
            let wire = MpiWire::open(raw::LARGEST)?;
            let description = format!("{} ({})", library_version(), wire.threads());
            Ok((wire, description))
        })
        .map(Arc::new)
    }
}

/// The name and version of the MPI library, as it gives them in its first line. Needs no running MPI.
pub fn library_version() -> String {
    let version = ::mpi::environment::library_version();
    let version =
        version.unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned());
    // Open MPI goes on with the package, after a comma.
    let line = version.lines().next().unwrap_or_default();
    let line = line.split(", package").next().unwrap_or_default();
    line.trim_matches(['\0', ' ']).to_owned()
}
