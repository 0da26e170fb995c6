//! The `mpi` engine, whose ranks are processes that communicate over MPI. It is meant for CPU clusters.
//!
//! The engine is built with the feature `mpi` against the MPI library of the system. The build requires `mpicc` and
//! libclang. The ranks are started with the `mpirun` of the library, or by Slurm with MPI support.
//!
//! Collectives are composed of point-to-point messages and reduce in a fixed order, so the results over MPI and over
//! threads are bit-identical. `MPI_Iallreduce` cannot guarantee this, because the MPI library chooses the order of the
//! reduction. The engine is kept because of this guarantee and gets no new features.
//!
//! One thread of the process makes all calls to MPI, so any level of MPI thread support is sufficient. An MPI error is
//! returned as a [`CommError::Engine`] that names the MPI function and the other rank. There is one exception: if MPI
//! cannot start, the MPI library itself ends the process.
//!
//! MPI does not report when a process dies. With Open MPI 4.1.4, messages to and from a dead process never complete, no
//! call returns an error, and MPI does not end the process. Over shared memory nothing is printed. Over TCP there is a
//! warning on the terminal. The `mpirun` of Open MPI ends the other processes about one second later. The heartbeats of
//! the ranks detect which process has died.

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

/// The transport of a process whose ranks communicate over MPI.
pub(crate) type MpiTransport = P2pCollectives;

impl MpiTransport {
    /// Starts MPI. Collective: call on all ranks of the world, once in the lifetime of a process.
    ///
    /// # Errors
    /// [`CommError::Engine`] if MPI reports an error, if MPI was already started, or if MPI does not start within
    /// `timeout`, for example because a rank has not called this function.
    pub fn open(pool: Arc<BufferPool>, timeout: Duration) -> Result<Arc<Self>, CommError> {
        Self::launch(ENGINE, pool, timeout, || {
            let transport = MpiP2p::open(raw::MAX_MESSAGE_BYTES)?;
            let description = format!("{} ({})", library_version(), transport.thread_level());
            Ok((transport, description))
        })
        .map(Arc::new)
    }
}

/// Returns the name and version of the MPI library, which is the first line of its version text. MPI need not be
/// started.
pub fn library_version() -> String {
    let version = ::mpi::environment::library_version();
    let version =
        version.unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned());
    // Open MPI appends the name of the package after a comma.
    let line = version.lines().next().unwrap_or_default();
    let line = line.split(", package").next().unwrap_or_default();
    line.trim_matches(['\0', ' ']).to_owned()
}
