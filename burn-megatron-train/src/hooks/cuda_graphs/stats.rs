//! Statistics of CUDA graphs.

use std::fmt;

/// The number of captured graphs, and the numbers of replayed and eager micro-batches of a rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CudaGraphStats {
    /// The number of captured graphs. One graph is captured for each input shape. Another graph is captured each time
    /// the parameters move in memory because a checkpoint is loaded.
    pub captured: u64,
    /// The number of micro-batches that ran as the replay of a graph.
    pub replayed: u64,
    /// The number of micro-batches that ran without a graph: the first three micro-batches of each input shape.
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
