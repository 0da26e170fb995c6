//! Formats tables of text.

/// A table of text. The first row is the header, and all rows have the same number of cells.
///
/// The first column is left-aligned, the other columns are right-aligned. If a table is too wide for a
/// terminal, its optional columns are removed in a given order. Then the widest left-aligned column is
/// shortened.
#[derive(Clone, Debug)]
pub struct Table {
    rows: Vec<Vec<String>>,
    left: Vec<usize>,
    optional: Vec<usize>,
}

/// The minimum width to which a column is shortened.
const MIN_WIDTH: usize = 8;
/// The space between two columns.
const GAP: usize = 2;

impl Table {
    /// Creates a table from rows of cells.
    pub fn new(rows: impl IntoIterator<Item = Vec<String>>) -> Self {
        Self {
            rows: rows.into_iter().collect(),
            left: vec![0],
            optional: vec![],
        }
    }

    /// Sets the indices of the left-aligned columns.
    pub fn with_left(mut self, columns: impl IntoIterator<Item = usize>) -> Self {
        self.left = columns.into_iter().collect();
        self
    }

    /// Sets the indices of the optional columns, which are removed in this order if the table is too wide.
    pub fn with_optional(mut self, columns: impl IntoIterator<Item = usize>) -> Self {
        self.optional = columns.into_iter().collect();
        self
    }

    /// Formats the table with at most `width` characters per line. `None` does not limit the length of a line.
    pub fn fit(&self, width: Option<usize>) -> String {
        let mut columns: Vec<_> = (0..self.rows.iter().map(Vec::len).max().unwrap_or(0)).collect();
        let widest = |column: &usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(*column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let mut widths: Vec<_> = columns.iter().map(widest).collect();
        if let Some(width) = width {
            let total = |columns: &[usize], widths: &[usize]| {
                let cells: usize = columns.iter().map(|column| widths[*column]).sum();
                cells + GAP * columns.len().saturating_sub(1)
            };
            for column in &self.optional {
                if total(&columns, &widths) > width {
                    columns.retain(|kept| kept != column);
                }
            }
            let excess = total(&columns, &widths).saturating_sub(width);
            let left = self.left.iter().filter(|column| columns.contains(column));
            if let Some(column) = left.max_by_key(|column| widths[**column]) {
                let least = MIN_WIDTH.min(widths[*column]);
                widths[*column] = widths[*column].saturating_sub(excess).max(least);
            }
        }
        let line = |row: &Vec<String>| {
            let cells = columns.iter().filter_map(|column| {
                let (cell, width) = (
                    shortened(row.get(*column)?, widths[*column]),
                    widths[*column],
                );
                Some(if self.left.contains(column) {
                    format!("{cell:<width$}")
                } else {
                    format!("{cell:>width$}")
                })
            });
            let cells: Vec<_> = cells.collect();
            cells.join(&" ".repeat(GAP)).trim_end().to_string()
        };
        let lines: Vec<_> = self.rows.iter().map(line).collect();
        lines.join("\n")
    }
}

/// Shortens a text that is too long by removing its start, because the end distinguishes paths and layouts.
pub(crate) fn shortened(text: &str, most: usize) -> String {
    let length = text.chars().count();
    if length <= most {
        return text.into();
    }
    let end: String = text.chars().skip(length + 1 - most).collect();
    format!("…{end}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let rows = [["layer", "min", "entropy"], ["blocks.0.moe", "0.5", "1.25"]];
        Table::new(rows.map(|row| row.map(String::from).to_vec())).with_optional([2])
    }

    #[test]
    fn a_table_fits_a_width() {
        let whole = "layer         min  entropy\nblocks.0.moe  0.5     1.25";
        assert_eq!(table().fit(None), whole);
        assert_eq!(table().fit(Some(26)), whole);
        assert_eq!(
            table().fit(Some(25)),
            "layer         min\nblocks.0.moe  0.5"
        );
        assert_eq!(table().fit(Some(15)), "layer       min\n…cks.0.moe  0.5");
        assert_eq!(table().fit(Some(1)).lines().next(), Some("layer     min"));
    }

    #[test]
    fn columns_are_aligned_as_they_are_set() {
        let rows = [["a", "text", "1"], ["b", "t", "23"]];
        let table = Table::new(rows.map(|row| row.map(String::from).to_vec()));
        assert_eq!(table.fit(None), "a  text   1\nb     t  23");
        assert_eq!(
            table.with_left([0, 1]).fit(None),
            "a  text   1\nb  t     23"
        );
        assert_eq!(Table::new([]).fit(Some(3)), "");
    }
}
