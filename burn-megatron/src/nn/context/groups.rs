//! The groups in which a context axis exchanges.

use crate::collective::Comm;
use crate::comm::CommError;

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
        let ranks = comm.group().ranks();
        let inside: Vec<_> = ranks.chunks(neighbours).map(<[usize]>::to_vec).collect();
        let between = (0..neighbours).map(|first| {
            let ranks = ranks.iter().skip(first).step_by(neighbours);
            ranks.copied().collect::<Vec<_>>()
        });
        let between: Vec<_> = between.collect();
        let inner = match inside.len() {
            1 => comm.clone(),
            _ => comm.split("context: neighbours", &inside)?,
        };
        let outer = match neighbours {
            1 => comm.clone(),
            _ => comm.split("context: between", &between)?,
        };
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
