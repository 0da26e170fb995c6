//! The mask: the visible keys of each query, and the queries to which each key is visible.

use std::ops::Range;

use super::options::{AttentionOptions, KeyRanges, MAX_POSITIONS};

/// The mask of an attention problem. The columns `row + shift - before ..= row + shift + after` are visible to `row`.
///
/// With causal attention, windows and [`KeyRanges`], the visible columns of each row are one range. The starts and ends
/// of these ranges do not decrease from row to row. Therefore the columns that are visible to a tile of rows are one
/// range, and so are the rows to which a column is visible. See [`transposed`](Self::transposed).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MaskRange {
    /// The position of row 0.
    pub shift: i32,
    /// The number of visible columns before the position of the row.
    pub before: i32,
    /// The number of visible columns after the position of the row.
    pub after: i32,
    /// The number of columns.
    pub columns: i32,
}

/// The value of an unlimited distance. It is larger than any distance, and twice this value plus one does not overflow.
const UNBOUNDED: i32 = MAX_POSITIONS as i32 - 1;

impl MaskRange {
    /// Creates the mask from the options of attention.
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

    /// Returns the mask with rows and columns exchanged. `rows` is the number of rows before the exchange.
    #[cfg(feature = "cubecl")]
    pub(super) fn transposed(&self, rows: usize) -> Self {
        Self {
            shift: -self.shift,
            before: self.after,
            after: self.before,
            columns: rows as i32,
        }
    }

    /// Returns the columns that are visible to `row`, limited to the range `within`.
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

    /// Returns the columns that are visible to each row.
    pub(super) fn all(&self, rows: usize, ranges: Option<&KeyRanges>) -> Vec<Range<usize>> {
        let within = |row: usize| ranges.map(|ranges| &ranges.ranges()[row]);
        (0..rows).map(|row| self.of(row, within(row))).collect()
    }
}
