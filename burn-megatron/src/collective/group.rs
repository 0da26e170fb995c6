//! The communicator of a group of ranks.

use std::sync::Arc;

use crate::comm::{CommError, Communicator, ReduceOp};

/// The communicator of a group of ranks.
pub type Comm = Arc<dyn Communicator>;

/// Returns the index of the first flag that is set on all ranks. Collective: call on all ranks, with the same
/// number of flags.
///
/// # Errors
///
/// [`CommError`] if the collective fails.
pub(crate) fn first_on_all(
    flags: impl Iterator<Item = bool>,
    comm: &Comm,
) -> Result<Option<usize>, CommError> {
    let flags: Vec<u8> = flags.map(u8::from).collect();
    let on_all: Vec<u8> = comm.all_reduce(flags.into(), ReduceOp::Min)?.into_vec();
    Ok(on_all.iter().position(|flag| *flag == 1))
}
