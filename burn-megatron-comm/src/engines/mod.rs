//! The engines that execute the operations of a communicator: threads of one process, NCCL, MPI, a single rank, and an
//! offline engine for a world that is not running.
//!
//! The `threads` and `mpi` engines reduce in the order of [`reduce`], so their results are bit-identical.

#[cfg(feature = "mpi")]
pub(crate) mod mpi;
// Only used by `World::from_env`.
#[cfg(any(feature = "cuda", test))]
#[allow(dead_code)]
pub(crate) mod nccl;
pub(crate) mod offline;
#[cfg(any(test, feature = "mpi"))]
pub(crate) mod p2p_collectives;
pub(crate) mod reduce;
pub(crate) mod single_rank;
pub(crate) mod threads;

/// Returns the version of the MPI library with which this program was built. Returns `None` if the feature `mpi` is
/// disabled.
pub fn mpi_library_version() -> Option<String> {
    #[cfg(feature = "mpi")]
    return Some(mpi::library_version());
    #[cfg(not(feature = "mpi"))]
    None
}
