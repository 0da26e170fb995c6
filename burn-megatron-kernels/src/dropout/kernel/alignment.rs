//! The alignment of a mask with the elements of a kernel.

use serde::{Deserialize, Serialize};

/// The number of words per block, and the minimum number of elements per group.
pub(super) const WORDS: usize = 4;

/// The mapping of the elements of a mask to Philox blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum MaskAlignment {
    /// Nothing is dropped.
    None,
    /// Four elements use the four words of one block.
    Aligned,
    /// Each element looks up the word of its draw.
    Any,
}

impl MaskAlignment {
    /// Returns the alignment for groups that start at multiples of `start`. `is_aligned` describes
    /// the mask.
    pub(super) fn new(is_aligned: Option<bool>, start: usize) -> Self {
        match is_aligned {
            None => Self::None,
            Some(true) if start.is_multiple_of(WORDS) => Self::Aligned,
            Some(_) => Self::Any,
        }
    }
}
