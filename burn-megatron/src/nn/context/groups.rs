//! The process groups of context parallelism.

use crate::collective::Comm;
use crate::comm::{CommError, consecutive_subgroups};

use super::exchange::OuterGroup;

/// A context group that is divided into groups of neighbouring ranks. Neighbours exchange heads by all-to-all. Outer
/// groups, which have one rank from each group of neighbours, exchange keys and values.
#[derive(Clone, Debug)]
pub struct ContextGroups {
    /// The communicator of all ranks that share a sequence.
    pub comm: Comm,
    /// The communicator of this rank and its neighbours.
    pub inner: Comm,
    /// The outer group of this rank.
    pub outer: OuterGroup,
}

impl ContextGroups {
    /// Splits `comm` into groups of `neighbours` consecutive ranks.
    ///
    /// This call is collective: make it on all ranks of `comm` with the same `neighbours`. `neighbours` must divide the
    /// number of ranks of `comm`.
    ///
    /// # Errors
    ///
    /// [`CommError`] if a rank is missing or passes a different `neighbours`.
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

    /// Creates groups of 1, 2, 4, ... consecutive ranks of `comm`, up to all ranks. Each rank is in one group of every
    /// size. The ranks of such a group exchange keys and values, but no heads.
    ///
    /// This call is collective: make it on all ranks of `comm`. The number of ranks must be a power of two.
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
