//! The process groups in which a context axis exchanges data.

use crate::collective::Comm;
use crate::comm::{CommError, consecutive_subgroups};

use super::exchange::OuterGroup;

/// A context group, divided into groups of neighbours. Neighbours exchange heads by all-to-all. The outer groups
/// exchange keys and values between the groups of neighbours.
#[derive(Clone, Debug)]
pub struct ContextGroups {
    /// All ranks that share a sequence.
    pub comm: Comm,
    /// The neighbours of this rank.
    pub inner: Comm,
    /// The ranks of the outer exchange, one from each group of neighbours.
    pub outer: OuterGroup,
}

impl ContextGroups {
    /// Splits `comm` into groups of `neighbours` consecutive ranks.
    ///
    /// Collective: call it on all ranks of `comm` with the same `neighbours`, which must divide the size of `comm`.
    ///
    /// # Errors
    ///
    /// [`CommError`] if a rank is missing or passes another size.
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

    /// Creates groups of 1, 2, 4, ... consecutive ranks of `comm`, up to all ranks. Each rank is in one group of
    /// every size. The groups only exchange keys and values.
    ///
    /// Collective: call it on all ranks of `comm`. Their number must be a power of two.
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
