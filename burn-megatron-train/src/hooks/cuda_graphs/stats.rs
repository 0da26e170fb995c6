//! Statistics of CUDA graphs.

use std::fmt;

/// The numbers of captured, replayed and eager micro-batches of a rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CudaGraphStats {
    /// The number of captured graphs: one per shape of rows, and another each time a loaded checkpoint moves the
    /// parameters.
    pub captured: u64,
    /// The number of micro-batches that a graph ran.
    pub replayed: u64,
    /// The number of micro-batches without a graph: the first three of each shape.
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
