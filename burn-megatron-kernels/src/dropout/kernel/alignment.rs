//! The alignment between the elements of a kernel and the Philox blocks of a mask.

use serde::{Deserialize, Serialize};

/// The number of words per block, and the minimum number of elements per group.
pub(super) const WORDS: usize = 4;

/// The mapping of the elements of a mask to Philox blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum MaskAlignment {
    /// There is no mask, so nothing is dropped.
    None,
    /// Four consecutive elements use the four words of one block.
    Aligned,
    /// Each element finds the block and the word of its random number.
    Any,
}

impl MaskAlignment {
    /// Returns the alignment for groups that start at multiples of `start`. `is_aligned` is `None` without a mask.
    pub(super) fn new(is_aligned: Option<bool>, start: usize) -> Self {
        match is_aligned {
            None => Self::None,
            Some(true) if start.is_multiple_of(WORDS) => Self::Aligned,
            Some(_) => Self::Any,
        }
    }
}
