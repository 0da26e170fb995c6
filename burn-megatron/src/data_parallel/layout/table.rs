//! Displays a layout as a table.

use std::fmt;

use super::BufferLayout;
use crate::text_table::Table;

/// Formats the layout as a table with one line per bucket and a line of totals. The columns are the number of the
/// bucket, the dtypes and the kind of its parameters, the unit of the model, the number of parameters, and the number
/// of elements without and with padding.
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
        f.write_str(&Table::new(rows).fit(None))
    }
}
