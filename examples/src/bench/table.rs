//! What was timed, as a table and as JSON.

use std::fmt::{self, Display};
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::recipe::Error;

/// One operation at one size in one direction. Seconds are medians.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    pub operation: String,
    pub direction: String,
    pub rows: usize,
    pub width: usize,
    /// What must be read and written at the least.
    pub bytes: usize,
    pub fused_seconds: f64,
    pub composed_seconds: f64,
    /// A copy that moves as many bytes.
    pub copy_seconds: f64,
}

/// All rows of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    pub device: String,
    pub dtype: String,
    pub samples: usize,
    /// Whether neighbouring operations of the composition were fused by Burn.
    pub fusion: bool,
    pub rows: Vec<Row>,
}

impl Report {
    /// Nothing timed yet.
    pub fn new(device: String, dtype: &str, samples: usize) -> Self {
        Self {
            device,
            dtype: dtype.into(),
            samples,
            fusion: cfg!(feature = "fusion"),
            rows: vec![],
        }
    }

    /// What stands above the rows.
    pub fn header(&self) -> String {
        let fusion = if self.fusion { "with" } else { "without" };
        format!(
            "{} in {}; medians of {} runs, in turns; `composed` is the same of Burn's operations, \
             {fusion} its fusion; `of copy`: the time of a copy of as many bytes over the kernel's\n\n\
             {:<18} {:<9} {:>15} {:>10} {:>8} {:>8} {:>11} {:>8}",
            self.device,
            self.dtype,
            self.samples,
            "operation",
            "direction",
            "rows x width",
            "ms",
            "GB/s",
            "of copy",
            "composed ms",
            "speedup",
        )
    }

    /// Writes the run as JSON.
    pub fn write(&self, path: &Path) -> Result<(), Error> {
        let text = serde_json::to_string_pretty(self)?;
        fs::write(path, text)
            .map_err(|error| format!("{} cannot be written: {error}", path.display()).into())
    }
}

impl Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:<18} {:<9} {:>15} {:>10.4} {:>8.1} {:>8.2} {:>11.4} {:>8.2}",
            self.operation,
            self.direction,
            format!("{} x {}", self.rows, self.width),
            self.fused_seconds * 1e3,
            self.bytes as f64 / self.fused_seconds / 1e9,
            self.copy_seconds / self.fused_seconds,
            self.composed_seconds * 1e3,
            self.composed_seconds / self.fused_seconds,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_shows_its_rates() {
        let row = Row {
            operation: "rms-norm".into(),
            direction: "forward".into(),
            rows: 1000,
            width: 500,
            bytes: 4_000_000,
            fused_seconds: 1e-3,
            composed_seconds: 3e-3,
            copy_seconds: 9e-4,
        };
        let cells: Vec<_> = row
            .to_string()
            .split_whitespace()
            .map(String::from)
            .collect();
        let expected = "rms-norm forward 1000 x 500 1.0000 4.0 0.90 3.0000 3.00";
        assert_eq!(cells.join(" "), expected);
    }
}
