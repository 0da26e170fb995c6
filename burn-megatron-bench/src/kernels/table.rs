//! The results, as a table and as JSON.

use std::path::Path;

use burn::tensor::Device;
use burn_megatron::atomic_file::replace_file;
use burn_megatron::device::{DeviceKind, is_unchecked};
use burn_megatron::kernels::fp8::engine_of_fp8;
use burn_megatron::kernels::gemm::engine_of;
use serde::{Deserialize, Serialize};

use burn_megatron_cli::internal::Error;
use burn_megatron_cli::internal::Shape;
use burn_megatron_cli::internal::count;
use burn_megatron_cli::internal::{Columns, wrapped};

/// One operation at one size in one direction. Seconds are medians.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KernelRow {
    pub operation: String,
    /// The engine of fused attention.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<String>,
    pub direction: String,
    pub rows: usize,
    pub width: usize,
    /// The least bytes that must be read and written.
    pub bytes: usize,
    pub fused_seconds: f64,
    /// The composition of Burn's operations; for 8-bit products, the same in the type of the run; for
    /// experts-one-gemm, one product of all rows.
    pub composed_seconds: Option<f64>,
    /// A copy that moves as many bytes.
    pub copy_seconds: f64,
}

/// All rows of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KernelReport {
    pub device: String,
    pub dtype: String,
    pub samples: usize,
    /// Whether results may be wrong, so that only the times of the host mean something.
    pub unchecked: bool,
    /// Whether Burn fused the operations of the composition.
    pub fusion: bool,
    /// The engine that multiplies matrices.
    pub gemm_engine: String,
    /// The engine that multiplies 8-bit matrices.
    pub fp8_engine: String,
    pub rows: Vec<KernelRow>,
    /// The cases that could not be timed, with the reason.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failed: Vec<String>,
}

/// The end of a header, for results that may be wrong.
pub fn unchecked(is_unchecked: bool) -> &'static str {
    match is_unchecked {
        true => "\nUNCHECKED: results may be wrong, and times are those of the host",
        false => "",
    }
}

impl KernelReport {
    /// A report without rows.
    pub fn new(device: &Device, kind: DeviceKind, dtype: &str, samples: usize) -> Self {
        Self {
            device: kind.to_string(),
            dtype: dtype.into(),
            samples,
            unchecked: is_unchecked(),
            fusion: cfg!(feature = "fusion"),
            gemm_engine: engine_of(device),
            fp8_engine: engine_of_fp8(device),
            rows: vec![],
            failed: vec![],
        }
    }

    /// Returns a description of the measurement, and the header of the table.
    pub fn header(&self) -> String {
        let fusion = if self.fusion { "with" } else { "without" };
        let Self { device, dtype, .. } = self;
        let about = format!(
            "{device} in {dtype}; medians of {}, interleaved; `composed`: the same with Burn's operations, {fusion} its \
             fusion, for 8-bit products the same in {dtype}, for experts-one-gemm one product of all rows; `of copy`: \
             the time of a copy of as many bytes over that of the kernel\nmatrices: {}\n8-bit matrices: {}{}",
            count(self.samples, "run"),
            self.gemm_engine,
            self.fp8_engine,
            unchecked(self.unchecked),
        );
        format!("{}\n\n{}", wrapped(&about), COLUMNS.line(HEAD))
    }

    /// The geometric mean of the speedups, over the rows that have one.
    pub fn summary(&self) -> Option<String> {
        let speedups: Vec<_> = self.rows.iter().filter_map(KernelRow::speedup).collect();
        let mean = speedups.iter().map(|speedup| speedup.ln()).sum::<f64>() / speedups.len() as f64;
        (!speedups.is_empty()).then(|| {
            format!(
                "\ngeometric mean of the speedups of {}: {:.2}",
                count(speedups.len(), "row"),
                mean.exp()
            )
        })
    }

    /// Adds the rows of a benchmark at one size, or the reason why there are none, and returns the lines of the table.
    pub fn add(
        &mut self,
        name: &str,
        shape: Shape,
        rows: Result<Vec<KernelRow>, String>,
    ) -> Vec<String> {
        match rows {
            Ok(rows) => {
                let lines = rows.iter().map(KernelRow::line).collect();
                self.rows.extend(rows);
                lines
            }
            Err(reason) => {
                let Shape { rows, width } = shape;
                let failed = format!("{name} {rows} x {width} failed: {reason}");
                self.failed.push(failed.clone());
                vec![failed]
            }
        }
    }

    /// Writes the run as JSON.
    pub fn write(&self, path: &Path) -> Result<(), Error> {
        let text = serde_json::to_string_pretty(self)?;
        replace_file(path, text.as_bytes())
            .map_err(|error| format!("cannot write {}: {error}", path.display()).into())
    }
}

const HEAD: [&str; 8] = [
    "operation",
    "direction",
    "rows x width",
    "ms",
    "GB/s",
    "of copy",
    "composed ms",
    "speedup",
];

const COLUMNS: Columns<8> = Columns {
    widths: [-18, -9, 13, 9, 7, 7, 11, 7],
    optional: &[6, 4],
};

impl KernelRow {
    /// The time of the composition over that of the kernel.
    fn speedup(&self) -> Option<f64> {
        self.composed_seconds
            .map(|seconds| seconds / self.fused_seconds)
    }

    /// The line of the table.
    pub fn line(&self) -> String {
        COLUMNS.line(self.cells())
    }

    fn cells(&self) -> [String; HEAD.len()] {
        let optional = |number: Option<String>| number.unwrap_or_else(|| "-".into());
        let composed = self
            .composed_seconds
            .map(|seconds| format!("{:.4}", seconds * 1e3));
        let operation = match &self.engine {
            Some(engine) => format!("attention-{engine}"),
            None => self.operation.clone(),
        };
        [
            operation,
            self.direction.clone(),
            format!("{} x {}", self.rows, self.width),
            format!("{:.4}", self.fused_seconds * 1e3),
            format!("{:.1}", self.bytes as f64 / self.fused_seconds / 1e9),
            format!("{:.2}", self.copy_seconds / self.fused_seconds),
            optional(composed),
            optional(self.speedup().map(|speedup| format!("{speedup:.2}"))),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_shows_its_rates() {
        let row = KernelRow {
            operation: "rms-norm".into(),
            engine: None,
            direction: "forward".into(),
            rows: 1000,
            width: 500,
            bytes: 4_000_000,
            fused_seconds: 1e-3,
            composed_seconds: Some(3e-3),
            copy_seconds: 9e-4,
        };
        let cells = |row: &KernelRow| row.cells().join(" ");
        let expected = "rms-norm forward 1000 x 500 1.0000 4.0 0.90 3.0000 3.00";
        assert_eq!(cells(&row), expected);
        let slower = KernelRow {
            composed_seconds: Some(0.75e-3),
            ..row.clone()
        };
        let alone = KernelRow {
            composed_seconds: None,
            ..row.clone()
        };
        let expected = "rms-norm forward 1000 x 500 1.0000 4.0 0.90 - -";
        assert_eq!(cells(&alone), expected);
        let attention = KernelRow {
            operation: "causal-attention".into(),
            engine: Some("mma".into()),
            ..alone.clone()
        };
        assert!(cells(&attention).starts_with("attention-mma forward "));
        let mut report = KernelReport {
            device: "cpu".into(),
            dtype: "f32".into(),
            samples: 1,
            unchecked: false,
            fusion: false,
            gemm_engine: String::new(),
            fp8_engine: String::new(),
            rows: vec![alone],
            failed: vec![],
        };
        assert_eq!(report.summary(), None);
        report.rows.extend([row, slower]);
        let summary = "\ngeometric mean of the speedups of 2 rows: 1.50";
        assert_eq!(report.summary().as_deref(), Some(summary));
        let shape = "8x4".parse().unwrap();
        let lines = report.add("adamw", shape, Err("out of memory".into()));
        assert_eq!(lines, ["adamw 8 x 4 failed: out of memory"]);
        assert_eq!((report.rows.len(), report.failed.len()), (3, 1));
    }
}
