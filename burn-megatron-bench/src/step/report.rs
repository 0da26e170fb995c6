//! The rows of the `step` table.

use burn_megatron_cli::internal::{TimedSteps, count, median};
use serde::Serialize;
use serde_json::Value;

use crate::report::{Column, fixed, unchecked};

/// The peak throughput of dense matrix multiplications in f16 and bf16, in TFLOP/s, from NVIDIA's data sheets. The key
/// is a part of the device name. The first match is used.
const PEAKS: [(&str, f64); 8] = [
    ("B200", 2250.0),
    ("H200 NVL", 835.0),
    ("H200", 989.0),
    ("H100 NVL", 835.0),
    ("H100 PCIe", 756.0),
    ("H100", 989.0),
    ("A100", 312.0),
    ("L40S", 362.0),
];

/// Returns the peak throughput of a known GPU in 16-bit dtypes, in TFLOP/s.
pub fn known_peak_tflops(device: &str) -> Option<f64> {
    let found = PEAKS.iter().find(|(name, _)| device.contains(name));
    found.map(|(_, peak)| *peak)
}

/// The settings in the JSON file.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepSettings {
    /// The device name from the driver if it is known, or else the kind of device.
    pub device: String,
    pub precision: String,
    /// The matrix multiplication engine.
    pub gemm_engine: String,
    /// Whether results may be wrong. In this case, only the host times are meaningful.
    pub unchecked: bool,
    /// The peak throughput of the device, or `None` if it is unknown.
    pub peak_tflops: Option<f64>,
    pub warm_up: usize,
}

impl StepSettings {
    /// Returns a description of the measurement.
    pub fn about(&self) -> String {
        let peak = match self.peak_tflops {
            Some(peak) => format!("{peak} TFLOP/s"),
            None => "unknown (--peak-tflops)".into(),
        };
        format!(
            "{} in {}, peak {peak}; medians of the steps after {}; batch: micro-batches x samples x tokens; GiB: peak \
             memory of the device's memory pools (on a CPU: of the process); driver: GiB in use on the device \
             according to its driver\nmatrices: {}{}",
            self.device,
            self.precision,
            count(self.warm_up, "warm-up step"),
            self.gemm_engine,
            unchecked(self.unchecked),
        )
    }
}

/// A row of the table: one model with one implementation of attention.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepRow {
    pub name: String,
    /// The family and the settings of the model.
    pub model: Value,
    pub attention: String,
    pub kernels: String,
    pub micro_batch_size: usize,
    pub micro_batches: usize,
    pub sequence_length: usize,
    /// The seconds of each measured step.
    pub seconds: Vec<f64>,
    pub flops_per_token: f64,
    /// The peak throughput of the device, or `None` if it is unknown.
    #[serde(skip)]
    pub peak_tflops: Option<f64>,
    pub peak_bytes: Option<u64>,
    /// The memory of the device that is in use after the steps, in bytes, as reported by the driver.
    pub driver_bytes: Option<u64>,
    /// The measurements of the same steps in PyTorch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub torch: Option<TorchSteps>,
}

/// The steps of a row in PyTorch, in alternation with the steps of this program.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TorchSteps {
    /// The name `PyTorch` with its version.
    pub name: String,
    pub seconds: Vec<f64>,
    pub peak_bytes: Option<u64>,
    /// For each round, the median time of PyTorch divided by the median time of this program.
    pub ratios: Vec<f64>,
}

impl StepRow {
    /// Creates a row from measured steps.
    pub fn new(
        name: &str,
        model: Value,
        batch: [usize; 3],
        timed: TimedSteps,
        peak_tflops: Option<f64>,
    ) -> Self {
        let [micro_batch_size, micro_batches, sequence_length] = batch;
        Self {
            name: name.into(),
            model,
            attention: timed.attention,
            kernels: timed.kernels,
            micro_batch_size,
            micro_batches,
            sequence_length,
            seconds: timed.seconds,
            flops_per_token: timed.flops_per_token,
            peak_tflops,
            peak_bytes: timed.peak_bytes,
            driver_bytes: timed.driver_bytes,
            torch: None,
        }
    }

    /// Adds another round of this row.
    pub fn add(&mut self, round: Self) {
        self.seconds.extend(round.seconds);
        self.peak_bytes = self.peak_bytes.max(round.peak_bytes);
        self.driver_bytes = self.driver_bytes.max(round.driver_bytes);
        if let (Some(known), Some(round)) = (&mut self.torch, round.torch) {
            known.seconds.extend(round.seconds);
            known.peak_bytes = known.peak_bytes.max(round.peak_bytes);
            known.ratios.extend(round.ratios);
        }
    }

    /// Returns the tokens of a step divided by the median time.
    pub fn tokens_per_second(&self) -> f64 {
        let tokens = self.micro_batch_size * self.micro_batches * self.sequence_length;
        tokens as f64 / median(&self.seconds)
    }

    fn tflops(&self) -> f64 {
        self.tokens_per_second() * self.flops_per_token / 1e12
    }

    /// Returns the model FLOPs utilization (MFU), as a share of the peak throughput of the device. Recomputation is not
    /// counted (Chowdhery et al., "PaLM", 2022, appendix B).
    pub fn mfu(&self) -> Option<f64> {
        Some(self.tflops() / self.peak_tflops?)
    }

    /// Returns the line for PyTorch that is printed below a row of the table.
    pub fn torch_line(&self) -> Option<String> {
        let torch = self.torch.as_ref()?;
        let tokens = self.micro_batch_size * self.micro_batches * self.sequence_length;
        let (least, most) = range(&torch.ratios);
        let memory = torch
            .peak_bytes
            .map(|bytes| format!(", {} GiB", gib(bytes)));
        Some(format!(
            "  {}: {:.0} tokens/s{}; speed of burn-megatron relative to it {:.2} ({least:.2} to {most:.2})",
            torch.name,
            tokens as f64 / median(&torch.seconds),
            memory.unwrap_or_default(),
            median(&torch.ratios),
        ))
    }
}

/// Columns that do not fit are left out: first the range, then the TFLOP/s, then the driver's memory.
pub const COLUMNS: &[Column<StepRow>] = &[
    Column::new("model", -12, |row| row.name.clone()),
    Column::new("attention", -10, |row| row.attention.clone()),
    Column::new("batch", 16, |row| {
        format!(
            "{} x {} x {}",
            row.micro_batches, row.micro_batch_size, row.sequence_length
        )
    }),
    Column::new("ms", 9, |row| fixed(1e3 * median(&row.seconds), 1)),
    Column::optional(1, "from - to", 18, |row| {
        let (least, most) = range(&row.seconds);
        format!("{:.1} - {:.1}", least * 1e3, most * 1e3)
    }),
    Column::new("tokens/s", 10, |row| fixed(row.tokens_per_second(), 0)),
    Column::optional(2, "TFLOP/s", 8, |row| fixed(row.tflops(), 3)),
    Column::new("MFU", 8, |row| {
        row.mfu()
            .map_or("unknown".into(), |mfu| format!("{:.1} %", 100.0 * mfu))
    }),
    Column::new("GiB", 8, |row| row.peak_bytes.map_or("unknown".into(), gib)),
    Column::optional(3, "driver", 8, |row| {
        row.driver_bytes.map_or("unknown".into(), gib)
    }),
];

fn gib(bytes: u64) -> String {
    format!("{:.2}", bytes as f64 / (1u64 << 30) as f64)
}

/// Returns the minimum and the maximum.
fn range(values: &[f64]) -> (f64, f64) {
    let ordered = |better: fn(f64, f64) -> f64| values.iter().copied().reduce(better);
    ordered(f64::min).zip(ordered(f64::max)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::row_line;

    #[test]
    fn the_figures_of_a_row_are_those_of_its_median() {
        let mut row = StepRow::new(
            "of a test",
            Value::Null,
            [8, 4, 1000],
            TimedSteps {
                seconds: vec![0.5, 0.25, 4.0],
                flops_per_token: 1e9,
                kernels: "fused: norm".into(),
                attention: "mma".into(),
                peak_bytes: Some(3 << 29),
                driver_bytes: Some(7 << 28),
            },
            Some(128.0),
        );
        assert_eq!(row.tokens_per_second(), 64_000.0);
        assert_eq!(row.mfu(), Some(0.5));
        let line = row_line(COLUMNS, &row);
        for expected in [
            "4 x 8 x 1000",
            "500.0",
            "250.0 - 4000.0",
            "64000",
            "50.0 %",
            "1.50",
            "1.75",
        ] {
            assert!(line.contains(expected), "{line}");
        }
        row.peak_tflops = None;
        assert!(row_line(COLUMNS, &row).contains("unknown"));
    }

    #[test]
    fn the_peak_is_that_of_the_most_specific_name() {
        for (device, peak) in [
            ("NVIDIA H100 80GB HBM3", Some(989.0)),
            ("NVIDIA H100 PCIe", Some(756.0)),
            ("NVIDIA A100-SXM4-80GB", Some(312.0)),
            ("a CPU", None),
        ] {
            assert_eq!(known_peak_tflops(device), peak, "{device}");
        }
    }
}
