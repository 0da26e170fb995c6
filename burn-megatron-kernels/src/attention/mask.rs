//! Which keys a query sees, and which queries see a key.

use std::ops::Range;

use super::options::{AttentionOptions, KeyRanges, MAX_POSITIONS};

/// Rows see the columns `row + shift - before ..= row + shift + after`.
///
/// Causality, windows and [`KeyRanges`] each leave every row one range of columns, whose ends do not
/// decrease from row to row. So a tile of rows also sees one range, and so do the rows that see a
/// column: [`transposed`](Self::transposed).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MaskRange {
    /// The position of row 0.
    pub shift: i32,
    /// Visible columns before the position of the row.
    pub before: i32,
    /// Visible columns after it.
    pub after: i32,
    /// The number of columns.
    pub columns: i32,
}

/// No limit: larger than any distance, and twice this plus one does not overflow.
const UNBOUNDED: i32 = MAX_POSITIONS as i32 - 1;

impl MaskRange {
    /// The keys that the queries of an attention see.
    pub(super) fn new(queries: usize, keys: usize, options: &AttentionOptions) -> Self {
        let reach = |distance: usize| {
            i32::try_from(distance).map_or(UNBOUNDED, |distance| distance.min(UNBOUNDED))
        };
        let (left, right) = match options.window {
            Some(window) => (reach(window.left), reach(window.right)),
            None => (UNBOUNDED, UNBOUNDED),
        };
        Self {
            shift: keys as i32 - queries as i32,
            before: left,
            after: if options.causal { 0 } else { right },
            columns: keys as i32,
        }
    }

    /// The same with rows and columns exchanged, for `rows` rows.
    #[cfg(feature = "cubecl")]
    pub(super) fn transposed(&self, rows: usize) -> Self {
        Self {
            shift: -self.shift,
            before: self.after,
            after: self.before,
            columns: rows as i32,
        }
    }

    /// The columns that `row` sees, within a range.
    pub(super) fn of(&self, row: usize, within: Option<&Range<usize>>) -> Range<usize> {
        let place = i64::from(self.shift) + row as i64;
        let low = (place - i64::from(self.before)).max(0);
        let high = (place + i64::from(self.after) + 1).min(i64::from(self.columns));
        let (low, high) = match within {
            Some(within) => (low.max(within.start as i64), high.min(within.end as i64)),
            None => (low, high),
        };
        low as usize..high.max(low) as usize
    }

    /// The columns that each row sees.
    pub(super) fn all(&self, rows: usize, ranges: Option<&KeyRanges>) -> Vec<Range<usize>> {
        let within = |row: usize| ranges.map(|ranges| &ranges.ranges()[row]);
        (0..rows).map(|row| self.of(row, within(row))).collect()
    }
}
