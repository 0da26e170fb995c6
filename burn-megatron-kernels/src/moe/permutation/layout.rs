//! The layout of the rows: the number of rows of each expert.

use super::NAME;
use crate::KernelError;
use crate::error::{check_option, check_shape};

/// The layout of the permuted rows, which determines the number of rows of each expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowLayout {
    /// Each expert has one row for each of its pairs that is not dropped. The numbers of rows are copied to the host.
    Kept,
    /// The rows of [`Kept`](Self::Kept), truncated or padded to this total number of rows. Pairs that do not fit are
    /// dropped. Padding rows are empty. Nothing is copied to the host.
    Rows(usize),
    /// The rows of [`Kept`](Self::Kept), followed by empty rows, so that the number of rows of each expert is a
    /// multiple of this number. The numbers of rows are copied to the host.
    Aligned(usize),
    /// Each expert has this number of rows. They hold its first pairs in token order, followed by empty rows. Nothing
    /// is copied to the host.
    Capacity(usize),
}

/// The numbers that define a [`RowLayout`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LayoutSizes {
    /// The number of rows of a group is padded to a multiple of this number.
    pub align: usize,
    /// The number of rows of each group, regardless of the number of its pairs. `None` if it depends on the pairs.
    pub capacity: Option<usize>,
    /// The maximum total number of rows of all groups.
    pub limit: usize,
}

impl LayoutSizes {
    /// Returns the number of rows of a group with `pairs` pairs, before [`limit`](Self::limit) is applied.
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

    /// Returns the number of rows of each expert. Calls `counts` only if the layout depends on the counts. Returns
    /// `None` for [`Rows`](Self::Rows).
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
