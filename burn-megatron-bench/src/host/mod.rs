//! The `burn-megatron-bench host` benchmark: the host time for a micro-batch and for a collective.
//!
//! The device must do no work, as on the stub in `tools/stub-cuda`, or take less time than the host needs to launch the
//! work.

mod tensor;

use std::path::PathBuf;

use burn::tensor::Device;
use burn_megatron::data_parallel::Precision;
use burn_megatron::device::{DeviceKind, check_results};
use burn_megatron::nn::fp8::{DelayedScaling, Fp8Recipe};
use burn_megatron_cli::internal::{
    Error, NamedModel, at_least_one, median, run as timed_steps, set_steps,
};
use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::report::{Column, Report};
use crate::step::recipe_of;

/// Flags of `host`.
#[derive(Args)]
pub struct HostBenchArgs {
    /// Device: cpu, wgpu or cuda. wgpu and cuda must be compiled in. On the CUDA stub, set
    /// BURN_MEGATRON_UNCHECKED_DEVICE=1, since the stub computes nothing.
    #[arg(long, default_value_t = DeviceKind::Cuda)]
    pub device: DeviceKind,
    /// Model to train, with one sample per micro-batch.
    #[arg(long, value_enum, value_name = "NAME", default_value = "124m")]
    pub model: NamedModel,
    /// Subjects: micro-batches of the model, micro-batches in FP8 with delayed scaling, and an all-reduce of two tensor
    /// ranks over NCCL, which requires two GPUs.
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        value_name = "SUBJECT,..",
        default_value = "model,fp8,tensor"
    )]
    pub only: Vec<HostSubject>,
    /// Number of measured micro-batches and collectives.
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = at_least_one)]
    pub repeats: usize,
    /// Number of warm-up micro-batches and collectives before the measured ones.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = at_least_one)]
    pub warm_up: usize,
    /// Write the results to this file as JSON, which tools/stub-cuda/compare.py reads.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// A subject of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum HostSubject {
    /// A micro-batch in the default type of the device.
    Model,
    /// A micro-batch in FP8 with delayed scaling.
    Fp8,
    /// An all-reduce of two tensor ranks.
    Tensor,
}

/// The settings in the JSON file.
#[derive(Serialize)]
struct Settings {
    device: String,
}

/// The host time of a subject.
#[derive(Debug, Serialize)]
struct HostRow {
    name: String,
    repeats: usize,
    /// The mean of the fastest tenth. Other processes affect it less than the other times.
    best_tenth_seconds: f64,
    median_seconds: f64,
}

const COLUMNS: &[Column<HostRow>] = &[
    Column::new("subject", -34, |row| row.name.clone()),
    Column::new("repeats", 10, |row| row.repeats.to_string()),
    Column::new("best tenth", 12, |row| milliseconds(row.best_tenth_seconds)),
    Column::new("median", 12, |row| milliseconds(row.median_seconds)),
];

fn milliseconds(seconds: f64) -> String {
    format!("{:.3} ms", 1e3 * seconds)
}

impl HostRow {
    fn new(name: String, seconds: &[f64]) -> Self {
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
}

/// Times the subjects, and prints a table.
pub fn run(args: &HostBenchArgs) -> Result<(), Error> {
    let devices = args.device.devices()?;
    check_results(&devices[0])?;
    let device = args.device.name();
    let about =
        format!("host time on {device}; valid only if the device has less work than the host");
    let mut report = Report::begin(&about, COLUMNS, Settings { device }, &args.json);
    for subject in &args.only {
        report.add(time(*subject, args, &devices)?)?;
    }
    report.finish("")
}

fn time(subject: HostSubject, args: &HostBenchArgs, devices: &[Device]) -> Result<HostRow, Error> {
    let model = args.model.name();
    let (name, seconds) = match subject {
        HostSubject::Model => (
            format!("{model} micro-batch"),
            micro_batches(args, &devices[0], None)?,
        ),
        HostSubject::Fp8 => {
            let delayed = Fp8Recipe::Delayed(DelayedScaling::default());
            let seconds = micro_batches(args, &devices[0], Some(delayed))?;
            (format!("{model} micro-batch, fp8 delayed"), seconds)
        }
        HostSubject::Tensor => {
            let elements = args.model.config().hidden * args.model.config().context;
            let seconds = tensor::all_reduces(args, elements, devices)?;
            ("all-reduce of 2 ranks".into(), seconds)
        }
    };
    Ok(HostRow::new(name, &seconds))
}

/// Times steps with one micro-batch of one sample. Returns seconds.
fn micro_batches(
    args: &HostBenchArgs,
    device: &Device,
    fp8: Option<Fp8Recipe>,
) -> Result<Vec<f64>, Error> {
    let (_, mut recipe) = recipe_of(args.model);
    recipe.data_parallel.precision = match args.device {
        DeviceKind::Cpu => Precision::F32,
        DeviceKind::Wgpu | DeviceKind::Cuda => Precision::Bf16,
    };
    recipe.fp8.recipe = fp8;
    set_steps(&mut recipe, [1, 1], args.warm_up + args.repeats + 1);
    let mut seconds = timed_steps(&recipe, device, args.warm_up)?.seconds;
    // A step is read after the next step is launched. The last step is read directly after the step before it.
    seconds.truncate(args.repeats);
    Ok(seconds)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::row_line;
    use crate::test_flags::parse_text;

    #[test]
    fn the_host_time_of_micro_batches_is_measured() {
        let flags = "--device cpu --model tiny --repeats 3 --warm-up 1 --only model,fp8";
        let args: HostBenchArgs = parse_text(flags).unwrap();
        for subject in &args.only {
            let row = time(*subject, &args, &[Device::flex()]).unwrap();
            assert_eq!(row.repeats, 3);
            assert!(row.best_tenth_seconds > 0.0 && row.best_tenth_seconds <= row.median_seconds);
        }
        let error = time(HostSubject::Tensor, &args, &[Device::flex()]);
        let error = error.unwrap_err().to_string();
        assert!(error.contains("requires two CUDA devices"), "{error}");
    }

    #[test]
    fn the_best_tenth_is_the_mean_of_the_fastest_times() {
        let seconds: Vec<f64> = (1..=20).rev().map(f64::from).collect();
        let row = HostRow::new("x".into(), &seconds);
        assert_eq!((row.best_tenth_seconds, row.median_seconds), (1.5, 10.5));
        let line = row_line(COLUMNS, &row);
        assert!(line.contains("1500.000 ms"), "{line}");
    }
}
