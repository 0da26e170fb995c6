//! The number of rows of each expert.

use super::NAME;
use crate::KernelError;
use crate::error::{check_option, check_shape};

/// The number of rows of each expert, from which the total follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowLayout {
    /// One for each pair that is not dropped. The counts are copied to the host.
    Kept,
    /// As [`Kept`](Self::Kept), with a number of rows that the caller knows, so that nothing is
    /// copied: pairs past it are dropped, and rows past the pairs are empty.
    Rows(usize),
    /// As [`Kept`](Self::Kept), and empty rows to the next multiple of this number, for each expert
    /// that has rows.
    Aligned(usize),
    /// This many for each expert, so that nothing is copied: the first pairs in token order, then
    /// empty rows.
    Capacity(usize),
}

/// A layout as numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LayoutSizes {
    /// Rows of a group are a multiple of this.
    pub align: usize,
    /// Rows of each group, whatever its pairs.
    pub capacity: Option<usize>,
    /// Rows of all groups at most.
    pub limit: usize,
}

impl LayoutSizes {
    /// The rows of a group of so many pairs, before the limit.
    pub fn group(&self, pairs: usize) -> usize {
        self.capacity
            .unwrap_or_else(|| pairs.next_multiple_of(self.align))
    }
}

impl RowLayout {
    pub(super) fn sizes(self) -> LayoutSizes {
        let kept = LayoutSizes {
            align: 1,
            capacity: None,
            limit: i32::MAX as usize,
        };
        match self {
            Self::Kept => kept,
            Self::Rows(limit) => LayoutSizes { limit, ..kept },
            Self::Aligned(align) => LayoutSizes { align, ..kept },
            Self::Capacity(rows) => LayoutSizes {
                capacity: Some(rows),
                ..kept
            },
        }
    }

    /// The rows of each expert, where the host knows them or may ask for the counts.
    pub(super) fn group_sizes(
        self,
        experts: usize,
        counts: impl FnOnce() -> Vec<usize>,
    ) -> Option<Vec<usize>> {
        let sizes = self.sizes();
        match self {
            Self::Kept | Self::Aligned(_) => {
                let counts = counts().into_iter();
                Some(counts.map(|count| sizes.group(count)).collect())
            }
            Self::Capacity(rows) => Some(vec![rows; experts]),
            Self::Rows(_) => None,
        }
    }

    /// Refuses an alignment of 0, and more pairs or rows than 31 bits count.
    pub(super) fn check(self, pairs: usize, experts: usize) -> Result<(), KernelError> {
        let aligns = self != Self::Aligned(0);
        check_option(NAME, aligns, "alignment", 0, "at least 1")?;
        let rows = match self {
            Self::Kept => pairs,
            Self::Rows(rows) => rows,
            Self::Aligned(align) => pairs.saturating_add(experts.saturating_mul(align - 1)),
            Self::Capacity(rows) => experts.saturating_mul(rows),
        };
        let most = i32::MAX as usize;
        check_shape(NAME, pairs <= most && rows <= most, || {
            format!(
                "{pairs} pairs and up to {rows} rows in {self:?} of {experts} experts: expected at most {most} of each"
            )
        })
    }
}
