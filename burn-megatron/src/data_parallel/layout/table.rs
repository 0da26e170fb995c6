//! The display of a layout as a table.

use std::fmt;

use super::BufferLayout;

/// A line per bucket: its number, dtypes and kind, unit of the model, parameters, their elements, and the
/// elements with padding; and a line of totals.
impl fmt::Display for BufferLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let head = [
            "bucket",
            "buffer",
            "unit",
            "parameters",
            "elements",
            "padded",
        ];
        let mut rows = vec![head.map(String::from).to_vec()];
        rows.extend(self.buckets().map(|(number, buffer, bucket)| {
            let shared = if bucket.shared { " shared" } else { "" };
            vec![
                number.to_string(),
                format!("{}{shared}", buffer.key),
                bucket.unit.to_string(),
                bucket.parameters.len().to_string(),
                bucket.parameter_elements().to_string(),
                bucket.padded().to_string(),
            ]
        }));
        rows.push(vec![
            "total".into(),
            String::new(),
            String::new(),
            self.locations.len().to_string(),
            self.parameter_elements().to_string(),
            self.elements().to_string(),
        ]);
        f.write_str(&aligned(&rows))
    }
}

/// Formats rows of equal length as lines: the first column left-aligned, the others right-aligned.
pub(crate) fn aligned(rows: &[Vec<String>]) -> String {
    let columns = rows.first().map_or(0, Vec::len);
    let width = |column: usize| {
        let widths = rows.iter().map(|row| row[column].chars().count());
        widths.max().unwrap_or(0)
    };
    let widths: Vec<_> = (0..columns).map(width).collect();
    let line = |row: &Vec<String>| {
        let numbered = row.iter().zip(&widths).enumerate();
        let cells = numbered.map(|(column, (cell, width))| match column {
            0 => format!("{cell:<width$}"),
            _ => format!("{cell:>width$}"),
        });
        cells.collect::<Vec<_>>().join("  ")
    };
    rows.iter().map(line).collect::<Vec<_>>().join("\n")
}
