//! The engines that run the calls of a communicator: threads of one process, NCCL, MPI, or no other rank at all.
//!
//! All reduce in the order of [`reduce`], so that threads and MPI return the same bits.

#[cfg(feature = "mpi")]
pub(crate) mod mpi;
// Used by `World::from_env` alone.
#[cfg(any(feature = "cuda", test))]
#[allow(dead_code)]
pub(crate) mod nccl;
pub(crate) mod offline;
#[cfg(any(test, feature = "mpi"))]
pub(crate) mod p2p_collectives;
pub(crate) mod reduce;
pub(crate) mod single_rank;
pub(crate) mod threads;

/// The version of the MPI library that this program was built with; `None` without the feature `mpi`.
pub fn mpi_library_version() -> Option<String> {
    #[cfg(feature = "mpi")]
    return Some(mpi::library_version());
    #[cfg(not(feature = "mpi"))]
    None
}
