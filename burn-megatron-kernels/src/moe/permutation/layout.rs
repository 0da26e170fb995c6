//! The number of rows of each expert.

use super::NAME;
use crate::KernelError;
use crate::error::{check_option, check_shape};

/// The number of rows of each expert, which determines the total number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowLayout {
    /// One row for each pair that is not dropped. The counts are copied to the host.
    Kept,
    /// The rows of [`Kept`](Self::Kept) with a total number given by the caller. Nothing is copied to the host. Pairs
    /// past the total are dropped, and rows past the pairs are empty.
    Rows(usize),
    /// The rows of [`Kept`](Self::Kept), followed for each expert that has rows by empty rows up to the next multiple
    /// of this number.
    Aligned(usize),
    /// This number of rows for each expert: the first pairs in token order, then empty rows. Nothing is copied to the
    /// host.
    Capacity(usize),
}

/// A layout as numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LayoutSizes {
    /// The alignment of the number of rows of a group.
    pub align: usize,
    /// The number of rows of each group, regardless of its pairs.
    pub capacity: Option<usize>,
    /// The maximum number of rows of all groups.
    pub limit: usize,
}

impl LayoutSizes {
    /// Returns the number of rows of a group with `pairs` pairs, before the limit.
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

    /// Returns the number of rows of each expert. Calls `counts` only if needed. Returns `None` for
    /// [`Rows`](Self::Rows).
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

    /// Checks that the alignment is not 0, and that pairs and rows fit into 31 bits.
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
