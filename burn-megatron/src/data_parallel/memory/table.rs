//! A plan as a table for people.

use std::fmt;

use super::MemoryPlan;
use crate::data_parallel::layout::aligned;

impl MemoryPlan {
    /// The plan as a table; with what was measured, and how far that is off, beside it.
    pub fn table(&self, measured: Option<&MemoryPlan>) -> String {
        let mut head = vec!["per rank".to_string(), "computed".into()];
        if measured.is_some() {
            head.extend(["measured".into(), "difference".into()]);
        }
        let measured = measured.map(Self::rows);
        let rows = self
            .rows()
            .into_iter()
            .enumerate()
            .map(|(row, (name, bytes))| {
                let mut cells = vec![name.to_string(), human(bytes)];
                if let Some(measured) = &measured {
                    let (_, found) = measured[row];
                    cells.extend([human(found), difference(bytes, found)]);
                }
                cells
            });
        aligned(&std::iter::once(head).chain(rows).collect::<Vec<_>>())
    }

    fn rows(&self) -> [(&'static str, u64); 5] {
        [
            ("parameters", self.parameters),
            ("gradients", self.gradients),
            ("optimizer state", self.optimizer),
            ("buffers", self.buffers),
            ("total", self.total()),
        ]
    }
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.table(None))
    }
}

/// Bytes for people: `512 B`, `1.50 GiB`.
pub fn human(bytes: u64) -> String {
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

/// How far off a measurement is: `+1.2 %`; a dash where nothing was computed to compare with.
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
