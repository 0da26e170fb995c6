//! The host times, as a table and as JSON.

use std::path::Path;

use burn_megatron::atomic_file::replace_file;
use serde::Serialize;

use burn_megatron_cli::internal::Error;
use burn_megatron_cli::internal::median;
use burn_megatron_cli::internal::{Columns, wrapped};

/// The host times of all subjects.
#[derive(Debug, Serialize)]
pub struct HostReport {
    pub device: String,
    pub rows: Vec<HostRow>,
}

/// The host time of a subject.
#[derive(Debug, Serialize)]
pub struct HostRow {
    pub name: String,
    pub repeats: usize,
    /// The mean of the fastest tenth: other processes lengthen the others.
    pub best_tenth_seconds: f64,
    pub median_seconds: f64,
}

const COLUMNS: Columns<4> = Columns {
    widths: [-34, 10, 12, 12],
    optional: &[],
};

impl HostReport {
    pub fn new(device: String) -> Self {
        let rows = vec![];
        Self { device, rows }
    }

    /// Returns the header of the table.
    pub fn header(&self) -> String {
        let about = format!(
            "host time on {}, which measures the host only if the device has less work",
            self.device
        );
        let columns = ["subject", "repeats", "best tenth", "median"];
        format!("{}\n\n{}", wrapped(&about), COLUMNS.line(columns))
    }

    /// Writes the report as JSON.
    pub fn write(&self, path: &Path) -> Result<(), Error> {
        let text = serde_json::to_string_pretty(self)?;
        replace_file(path, text.as_bytes())
            .map_err(|error| format!("cannot write {}: {error}", path.display()).into())
    }
}

impl HostRow {
    pub fn new(name: String, seconds: &[f64]) -> Self {
        let mut sorted = seconds.to_vec();
        sorted.sort_by(f64::total_cmp);
        let best = &sorted[..sorted.len().div_ceil(10)];
        Self {
            name,
            repeats: seconds.len(),
            best_tenth_seconds: best.iter().sum::<f64>() / best.len() as f64,
            median_seconds: median(seconds),
        }
    }

    /// Returns the line of the table.
    pub fn line(&self) -> String {
        let milliseconds = |seconds: f64| format!("{:.3} ms", 1e3 * seconds);
        COLUMNS.line([
            self.name.clone(),
            self.repeats.to_string(),
            milliseconds(self.best_tenth_seconds),
            milliseconds(self.median_seconds),
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_tenth_is_the_mean_of_the_fastest_times() {
        let seconds: Vec<f64> = (1..=20).rev().map(f64::from).collect();
        let row = HostRow::new("x".into(), &seconds);
        assert_eq!((row.best_tenth_seconds, row.median_seconds), (1.5, 10.5));
        assert!(row.line().contains("1500.000 ms"), "{}", row.line());
    }
}
