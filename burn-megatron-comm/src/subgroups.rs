//! A group as groups of consecutive ranks, and the groups between these.

use std::sync::Arc;

use crate::communicator::Communicator;
use crate::error::CommError;

/// The group of this rank among those of `size` consecutive ranks, and the group of the ranks with its index in each; the
/// names are theirs. One that has all ranks is `comm` itself.
///
/// Collective: call on all ranks of `comm`, with the same size, which divides theirs.
///
/// # Errors
///
/// [`CommError`] if a rank is missing or has another size.
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
