//! Which keys a query sees, and which queries see a key.

use std::ops::Range;

use super::options::{AttentionOptions, Documents, MAX_POSITIONS};

/// Rows see the columns `row + shift - before ..= row + shift + after`.
///
/// Causality, windows and documents all leave each row one range of columns, whose two ends never
/// fall from row to row. So a tile of rows sees a range too, and the same holds for what sees a
/// column: [`transposed`](Self::transposed).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Band {
    /// Where row 0 stands.
    pub shift: i32,
    /// Columns that are seen before the place of the row.
    pub before: i32,
    /// Columns that are seen behind it.
    pub after: i32,
    /// How many columns there are.
    pub columns: i32,
}

/// As far as any place is away; twice this, and one more, is still counted.
const EVERYWHERE: i32 = MAX_POSITIONS as i32 - 1;

impl Band {
    /// The keys that the queries of an attention see.
    pub(super) fn new(queries: usize, keys: usize, options: &AttentionOptions) -> Self {
        let reach = |distance: usize| {
            i32::try_from(distance).map_or(EVERYWHERE, |distance| distance.min(EVERYWHERE))
        };
        let (left, right) = match options.window {
            Some(window) => (reach(window.left), reach(window.right)),
            None => (EVERYWHERE, EVERYWHERE),
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

    /// The columns that `row` sees, within its document.
    pub(super) fn of(&self, row: usize, document: Option<&Range<usize>>) -> Range<usize> {
        let place = i64::from(self.shift) + row as i64;
        let low = (place - i64::from(self.before)).max(0);
        let high = (place + i64::from(self.after) + 1).min(i64::from(self.columns));
        let (low, high) = match document {
            Some(document) => (
                low.max(document.start as i64),
                high.min(document.end as i64),
            ),
            None => (low, high),
        };
        low as usize..high.max(low) as usize
    }

    /// The columns that each row sees.
    pub(super) fn all(&self, rows: usize, documents: Option<&Documents>) -> Vec<Range<usize>> {
        let documents = documents.map(Documents::ranges);
        let document = |row: usize| documents.as_ref().map(|documents| &documents[row]);
        (0..rows).map(|row| self.of(row, document(row))).collect()
    }
}
