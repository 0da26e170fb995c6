//! The statistics of CUDA graphs.

use std::fmt;

/// The numbers of captured, replayed and other micro-batches of a rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CudaGraphStats {
    /// Graphs that were captured: one for each shape of rows, and one more each time that parameters have moved, as a checkpoint
    /// was loaded.
    pub captured: u64,
    /// Micro-batches by a graph.
    pub replayed: u64,
    /// Micro-batches without one: the first three of a shape.
    pub eager: u64,
}

impl fmt::Display for CudaGraphStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            captured,
            replayed,
            eager,
        } = self;
        write!(
            f,
            "{captured} captured; {replayed} micro-batches by a graph, {eager} before"
        )
    }
}
