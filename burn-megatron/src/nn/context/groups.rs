//! The groups in which a context axis exchanges.

use crate::collective::Comm;
use crate::comm::{CommError, consecutive_subgroups};

use super::exchange::OuterGroup;

/// A context group as groups of neighbours, which exchange heads by all-to-all, and the groups between these,
/// which exchange keys and values.
#[derive(Clone, Debug)]
pub struct ContextGroups {
    /// All ranks that share a sequence.
    pub comm: Comm,
    /// The neighbours of this rank.
    pub inner: Comm,
    /// One rank of each group of neighbours.
    pub outer: OuterGroup,
}

impl ContextGroups {
    /// Splits `comm` into groups of `neighbours` consecutive ranks.
    ///
    /// Collective: call on all ranks of `comm`, with the same size, which divides theirs.
    ///
    /// # Errors
    ///
    /// [`CommError`] if a rank is missing or has another size.
    pub fn new(comm: &Comm, neighbours: usize) -> Result<Self, CommError> {
        let names = ["context: neighbours", "context: between"];
        let [inner, outer] = consecutive_subgroups(comm, neighbours, names)?;
        Ok(Self {
            comm: comm.clone(),
            inner,
            outer: OuterGroup {
                comm: outer,
                neighbours,
            },
        })
    }

    /// Groups of 1, 2, 4, ... consecutive ranks of `comm`, up to all, each rank in one of every size. They exchange keys and
    /// values alone.
    ///
    /// Collective: call on all ranks of `comm`, a power of two.
    ///
    /// # Errors
    ///
    /// [`CommError`] if a rank is missing.
    pub fn powers_of_two(comm: &Comm) -> Result<Vec<Self>, CommError> {
        let ranks = comm.group().ranks();
        let of_size = |size: usize| {
            if size == ranks.len() {
                return Ok(comm.clone());
            }
            let groups: Vec<_> = ranks.chunks(size).map(<[usize]>::to_vec).collect();
            comm.split(&format!("hybrid context: {size}"), &groups)
        };
        let single = of_size(1)?;
        let sizes = std::iter::successors(Some(1), |size| Some(2 * size));
        let sizes = sizes.take_while(|size| *size <= ranks.len());
        let groups = sizes.map(|size| {
            let comm = if size == 1 {
                single.clone()
            } else {
                of_size(size)?
            };
            Ok(Self {
                comm: comm.clone(),
                inner: single.clone(),
                outer: OuterGroup {
                    comm,
                    neighbours: 1,
                },
            })
        });
        groups.collect()
    }
}
