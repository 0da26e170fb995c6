//! Displays a memory plan as a table.

use std::fmt;

use super::MemoryPlan;
use crate::text_table::Table;

impl MemoryPlan {
    /// Formats the plan as a table. If `measured` is given, the table has two more columns: the measured memory, and
    /// its relative difference from the plan.
    pub fn table(&self, measured: Option<&MemoryPlan>) -> String {
        let mut head = vec!["per rank".to_string(), "computed".into()];
        if measured.is_some() {
            head.extend(["measured".into(), "difference".into()]);
        }
        let measured_rows = measured.map(Self::rows);
        // The last row shows the host memory.
        let is_offloaded =
            self.host_optimizer > 0 || measured.is_some_and(|m| m.host_optimizer > 0);
        let rows = self.rows();
        let shown = rows.len() - usize::from(!is_offloaded);
        let rows = rows
            .into_iter()
            .take(shown)
            .enumerate()
            .map(|(row, (name, bytes))| {
                let mut cells = vec![name.to_string(), format_bytes(bytes)];
                if let Some(measured) = &measured_rows {
                    let (_, found) = measured[row];
                    cells.extend([format_bytes(found), difference(bytes, found)]);
                }
                cells
            });
        Table::new(std::iter::once(head).chain(rows)).fit(None)
    }

    fn rows(&self) -> [(&'static str, u64); 6] {
        [
            ("parameters", self.parameters),
            ("gradients", self.gradients),
            ("optimizer state", self.optimizer),
            ("buffers", self.buffers),
            ("total", self.total()),
            ("optimizer state on the host", self.host_optimizer),
        ]
    }
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.table(None))
    }
}

/// Formats a number of bytes with a binary unit, for example `512 B` or `1.50 GiB`.
pub fn format_bytes(bytes: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let power = bytes.max(1).ilog2() / 10;
    match power {
        0 => format!("{bytes} B"),
        power => {
            let unit = (1u64 << (10 * power)) as f64;
            format!("{:.2} {}", bytes as f64 / unit, units[power as usize - 1])
        }
    }
}

/// Formats the relative difference of a measurement: `+1.2 %`, or a dash if 0 was computed.
fn difference(computed: u64, measured: u64) -> String {
    match computed {
        0 if measured > 0 => "-".into(),
        0 => "+0.0 %".into(),
        computed => {
            let ratio = measured as f64 / computed as f64;
            format!("{:+.1} %", (ratio - 1.0) * 100.0)
        }
    }
}
