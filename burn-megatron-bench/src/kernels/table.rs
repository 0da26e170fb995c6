//! The rows of the `kernels` table.

use burn::tensor::Device;
use burn_megatron::device::{DeviceKind, is_unchecked};
use burn_megatron::kernels::fp8::engine_of_fp8;
use burn_megatron::kernels::gemm::engine_of;
use burn_megatron_cli::internal::count;
use serde::Serialize;

use crate::report::{Column, fixed, unchecked};

/// A row of the table: one operation at one size in one direction. Times are medians in seconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KernelRow {
    pub operation: String,
    /// The engine of fused attention.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub engine: Option<String>,
    pub direction: String,
    pub rows: usize,
    pub width: usize,
    /// The minimum number of bytes that must be read and written.
    pub bytes: usize,
    pub fused_seconds: f64,
    /// The time of the baseline: the same computation in separate Burn operations. For FP8 matrix multiplications, the
    /// baseline is the same multiplication in the dtype of the benchmark. For experts-one-gemm, it is one matrix
    /// multiplication of all rows.
    pub composed_seconds: Option<f64>,
    /// The time of a copy of the same number of bytes.
    pub copy_seconds: f64,
}

/// The settings in the JSON file.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KernelSettings {
    device: String,
    dtype: String,
    samples: usize,
    /// Whether results may be wrong. In this case, only the host times are meaningful.
    unchecked: bool,
    /// Whether Burn fused the separate operations of the baseline.
    fusion: bool,
    /// The matrix multiplication engine.
    gemm_engine: String,
    /// The FP8 matrix multiplication engine.
    fp8_engine: String,
}

impl KernelSettings {
    pub fn new(device: &Device, kind: DeviceKind, dtype: String, samples: usize) -> Self {
        Self {
            device: kind.to_string(),
            dtype,
            samples,
            unchecked: is_unchecked(),
            fusion: cfg!(feature = "fusion"),
            gemm_engine: engine_of(device),
            fp8_engine: engine_of_fp8(device),
        }
    }

    /// Returns a description of the measurement.
    pub fn about(&self) -> String {
        let fusion = if self.fusion { "with" } else { "without" };
        let Self { device, dtype, .. } = self;
        format!(
            "{device} in {dtype}; medians of {}, interleaved; `composed`: the same computation with Burn's operations, \
             {fusion} fusion (for FP8 matrix products in {dtype}, for experts-one-gemm as one matrix product of all \
             rows); `of copy`: the time of a copy of the same number of bytes divided by the time of the \
             kernel\nmatrices: {}\nFP8 matrices: {}{}",
            count(self.samples, "run"),
            self.gemm_engine,
            self.fp8_engine,
            unchecked(self.unchecked),
        )
    }
}

pub const COLUMNS: &[Column<KernelRow>] = &[
    Column::new("operation", -18, |row| match &row.engine {
        Some(engine) => format!("attention-{engine}"),
        None => row.operation.clone(),
    }),
    Column::new("direction", -9, |row| row.direction.clone()),
    Column::new("rows x width", 13, |row| {
        format!("{} x {}", row.rows, row.width)
    }),
    Column::new("ms", 9, |row| fixed(row.fused_seconds * 1e3, 4)),
    Column::optional(2, "GB/s", 7, |row| {
        fixed(row.bytes as f64 / row.fused_seconds / 1e9, 1)
    }),
    Column::new("of copy", 7, |row| {
        fixed(row.copy_seconds / row.fused_seconds, 2)
    }),
    Column::optional(1, "composed ms", 11, |row| match row.composed_seconds {
        Some(seconds) => format!("{:.4}", seconds * 1e3),
        None => "-".into(),
    }),
    Column::new("speedup", 7, |row| match row.speedup() {
        Some(speedup) => format!("{speedup:.2}"),
        None => "-".into(),
    }),
];

impl KernelRow {
    /// Returns the time of the baseline divided by the time of the kernel.
    fn speedup(&self) -> Option<f64> {
        self.composed_seconds
            .map(|seconds| seconds / self.fused_seconds)
    }
}

/// Returns the geometric mean of the speedups over the rows that have a speedup. Empty if there are no such rows.
pub fn summary(rows: &[KernelRow]) -> String {
    let speedups: Vec<_> = rows.iter().filter_map(KernelRow::speedup).collect();
    if speedups.is_empty() {
        return String::new();
    }
    let mean = speedups.iter().map(|speedup| speedup.ln()).sum::<f64>() / speedups.len() as f64;
    format!(
        "geometric mean of the speedups of {}: {:.2}",
        count(speedups.len(), "row"),
        mean.exp()
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::row_line;

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
        let cells = |row: &KernelRow| {
            let line = row_line(COLUMNS, row);
            line.split_whitespace().collect::<Vec<_>>().join(" ")
        };
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
        assert_eq!(summary(std::slice::from_ref(&alone)), "");
        let rows = [alone, row, slower];
        insta::assert_snapshot!(summary(&rows), @"geometric mean of the speedups of 2 rows: 1.50");
    }
}
