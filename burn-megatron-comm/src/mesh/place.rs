//! The place of a rank on one axis.

/// Number `index` of `size` ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// This rank's index.
    pub index: usize,
    /// The number of ranks.
    pub size: usize,
}
