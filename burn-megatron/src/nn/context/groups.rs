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
}
