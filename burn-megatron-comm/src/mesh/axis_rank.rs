//! The index of a rank on one axis.

/// Index of a rank on an axis, and the size of the axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AxisRank {
    /// This rank's index.
    pub index: usize,
    /// The number of ranks.
    pub size: usize,
}
