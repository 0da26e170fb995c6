//! Splits of a group into subgroups of consecutive ranks, and the groups across these subgroups.

use std::sync::Arc;

use crate::communicator::Communicator;
use crate::error::CommError;

/// Splits `comm` into inner groups of `size` consecutive ranks, and into outer groups of the ranks that have the same
/// index in each inner group. Returns the inner and the outer group of this rank. If a group contains all ranks of
/// `comm`, `comm` itself is returned for it.
///
/// Collective: call on all ranks of `comm` with the same `size`, which must divide the number of ranks.
///
/// # Errors
///
/// [`CommError`] if a rank does not take part or passes a different size.
pub fn consecutive_subgroups(
    comm: &Arc<dyn Communicator>,
    size: usize,
    [inner, outer]: [&str; 2],
) -> Result<[Arc<dyn Communicator>; 2], CommError> {
    let ranks = comm.group().ranks();
    let consecutive: Vec<_> = ranks.chunks(size).map(<[usize]>::to_vec).collect();
    let same_index = |index| ranks.iter().skip(index).step_by(size).copied().collect();
    let same_index: Vec<Vec<usize>> = (0..size).map(same_index).collect();
    let part_of = |name, groups: &[Vec<usize>]| match groups.len() {
        1 => Ok(comm.clone()),
        _ => comm.split(name, groups),
    };
    Ok([part_of(inner, &consecutive)?, part_of(outer, &same_index)?])
}
