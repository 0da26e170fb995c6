//! The results, as a table and as JSON.

use std::fmt::{self, Display};
use std::path::Path;

use burn::tensor::Device;
use burn_megatron::kernels::fp8::engine_of_fp8;
use burn_megatron::partial::replace_file;
use serde::{Deserialize, Serialize};

use crate::error::Error;

/// One operation at one size in one direction. Seconds are medians.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KernelRow {
    pub operation: String,
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
    /// Whether Burn fused the operations of the composition.
    pub fusion: bool,
    /// What multiplies 8-bit matrices.
    pub fp8_engine: String,
    pub rows: Vec<KernelRow>,
}

impl KernelReport {
    /// A report without rows.
    pub fn new(device: &Device, dtype: &str, samples: usize) -> Self {
        Self {
            device: format!("{device:?}"),
            dtype: dtype.into(),
            samples,
            fusion: cfg!(feature = "fusion"),
            fp8_engine: engine_of_fp8(device),
            rows: vec![],
        }
    }

    /// The header of the table.
    pub fn header(&self) -> String {
        let fusion = if self.fusion { "with" } else { "without" };
        format!(
            "{} in {}; medians of {} runs, interleaved; `composed`: the same with Burn's operations, \
             {fusion} its fusion, for 8-bit products the same in {}, for experts-one-gemm one product of \
             all rows; `of copy`: the time of a copy of as many bytes over that of the kernel\n8-bit matrices: {}\n\n\
             {:<18} {:<9} {:>15} {:>10} {:>8} {:>8} {:>11} {:>8}",
            self.device,
            self.dtype,
            self.samples,
            self.dtype,
            self.fp8_engine,
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
        replace_file(path, text.as_bytes())
            .map_err(|error| format!("cannot write {}: {error}", path.display()).into())
    }
}

impl Display for KernelRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let composed = |write: &dyn Fn(f64) -> String| match self.composed_seconds {
            Some(seconds) => write(seconds),
            None => "-".to_string(),
        };
        write!(
            f,
            "{:<18} {:<9} {:>15} {:>10.4} {:>8.1} {:>8.2} {:>11} {:>8}",
            self.operation,
            self.direction,
            format!("{} x {}", self.rows, self.width),
            self.fused_seconds * 1e3,
            self.bytes as f64 / self.fused_seconds / 1e9,
            self.copy_seconds / self.fused_seconds,
            composed(&|seconds| format!("{:.4}", seconds * 1e3)),
            composed(&|seconds| format!("{:.2}", seconds / self.fused_seconds)),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_shows_its_rates() {
        let row = KernelRow {
            operation: "rms-norm".into(),
            direction: "forward".into(),
            rows: 1000,
            width: 500,
            bytes: 4_000_000,
            fused_seconds: 1e-3,
            composed_seconds: Some(3e-3),
            copy_seconds: 9e-4,
        };
        let cells = |row: &KernelRow| {
            let text = row.to_string();
            text.split_whitespace().collect::<Vec<_>>().join(" ")
        };
        let expected = "rms-norm forward 1000 x 500 1.0000 4.0 0.90 3.0000 3.00";
        assert_eq!(cells(&row), expected);
        let alone = KernelRow {
            composed_seconds: None,
            ..row
        };
        let expected = "rms-norm forward 1000 x 500 1.0000 4.0 0.90 - -";
        assert_eq!(cells(&alone), expected);
    }
}
