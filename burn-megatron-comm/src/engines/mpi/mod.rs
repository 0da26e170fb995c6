//! The engine whose ranks are processes under an MPI: for clusters of CPUs.
//!
//! Built with the feature `mpi`, against the MPI library of the system (its `mpicc` and libclang are needed
//! for that), and started by its `mpirun` or by a Slurm with MPI support.
//!
//! Collectives are composed of point-to-point messages and reduce in a fixed order, so that results over MPI
//! and over threads are bit-equal; `MPI_Iallreduce` cannot promise that, as its order of reduction is the
//! library's choice. The engine is kept for this and gets no new features.
//!
//! One thread of the process makes all calls to MPI, so that any level of thread support will do. What MPI
//! reports becomes a [`CommError::Engine`] with the function and the peer's rank, except that an MPI that cannot
//! start ends the process itself.
//!
//! MPI does not report that a process has died: with Open MPI 4.1.4, messages to and from it never complete,
//! over shared memory silently, over TCP with a warning on the terminal, and no call returns an error or ends
//! the process. Its `mpirun` ends the other processes about a second later. The ranks' heartbeats find out who
//! has died.

mod p2p;
mod raw;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use crate::engines::p2p_collectives::P2pCollectives;
use crate::error::CommError;
use crate::pool::BufferPool;
use p2p::MpiP2p;

/// The name of the engine.
const ENGINE: &str = "mpi";

/// The transport of one process under MPI.
pub(crate) type MpiTransport = P2pCollectives;

impl MpiTransport {
    /// Starts MPI. Collective: call on all ranks of the world, once in the life of a process.
    ///
    /// # Errors
    /// [`CommError::Engine`] if MPI reports an error or was started before, or if it has not started
    /// within `timeout`, for example because a rank has not called this.
    pub fn open(pool: Arc<BufferPool>, timeout: Duration) -> Result<Arc<Self>, CommError> {
        Self::launch(ENGINE, pool, timeout, || {
            let transport = MpiP2p::open(raw::MAX_MESSAGE_BYTES)?;
            let description = format!("{} ({})", library_version(), transport.thread_level());
            Ok((transport, description))
        })
        .map(Arc::new)
    }
}

/// The name and version of the MPI library, from the first line that it reports. MPI need not be started.
pub fn library_version() -> String {
    let version = ::mpi::environment::library_version();
    let version =
        version.unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned());
    // Open MPI appends the package, after a comma.
    let line = version.lines().next().unwrap_or_default();
    let line = line.split(", package").next().unwrap_or_default();
    line.trim_matches(['\0', ' ']).to_owned()
}
