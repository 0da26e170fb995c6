//! Implements `burn-megatron check-gpu`, which checks that a GPU of this machine computes correct results, and
//! reports the libraries.
//!
//! Each check is a separate process with a time limit. A crash, a hang or a corrupted device ends only one check.

mod child;
mod comm;
mod kernels;
mod libraries;
mod outcome;
mod training;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use burn_megatron::atomic_file::replace_file;
use burn_megatron::device::{DeviceKind, is_unchecked};
use clap::{Args, ValueEnum};

use crate::error::Error;
use crate::ranks::seconds;
use outcome::{CheckResult, Findings, Report, Verdict};

/// Flags of `check-gpu`.
#[derive(Args)]
pub struct CheckGpuArgs {
    /// The kind of device to check: cuda, wgpu or cpu.
    #[arg(long, default_value_t = DeviceKind::Cuda)]
    pub device: DeviceKind,
    /// Write the results to this file as JSON. The file is updated after each check.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Run only these checks.
    #[arg(long, value_delimiter = ',', value_name = "CHECK,..")]
    pub only: Vec<Check>,
    /// Timeout of each check in seconds. A check that takes longer is killed and fails.
    #[arg(long, value_name = "SECONDS", default_value_t = 120.0)]
    pub timeout: f64,
    /// Run the given check in this process, and print its findings as JSON.
    #[arg(long, hide = true)]
    pub run: Option<Check>,
}

/// Checks in the order of execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Check {
    /// The CUDA libraries and their versions.
    Libraries,
    /// A first simple kernel, compared with the same computation on the host.
    FirstKernel,
    /// Matrix multiplications in every dtype, compared with the CPU.
    Products,
    /// Fused kernels in every dtype, in the forward and the backward, compared with the CPU.
    Kernels,
    /// Attention with each engine, compared with the portable engine.
    Attention,
    /// Five training steps of small models, compared with the CPU.
    Training,
    /// Training steps in FP8, compared with the CPU.
    Fp8,
    /// The memory use and the speed of a training run.
    Memory,
    /// NCCL on one rank.
    Nccl,
    /// NCCL on all devices, with one process per rank.
    AllDevices,
}

impl Check {
    fn name(self) -> String {
        let value = self.to_possible_value();
        value.map_or_else(String::new, |value| value.get_name().into())
    }

    /// Returns whether the check computes on the device and therefore requires correct results.
    fn computes(self) -> bool {
        !matches!(self, Self::Libraries | Self::FirstKernel)
    }

    /// Returns the reason why other checks cannot run after this check failed.
    fn obstacle(self, failed: &CheckResult) -> &'static str {
        let reason = failed.reason.as_deref().unwrap_or_default();
        match self {
            Self::Libraries => "a library is missing",
            _ if reason.contains("wrong results") => "device gives wrong results",
            _ => "the first kernel failed",
        }
    }

    fn run(self, kind: DeviceKind) -> Result<Findings, Error> {
        match self {
            Self::Libraries => libraries::libraries(kind),
            Self::FirstKernel => libraries::first_kernel(kind),
            Self::Products => kernels::products(&kind.checked()?, kind),
            Self::Kernels => kernels::kernels(&kind.checked()?),
            Self::Attention => kernels::attention(&kind.checked()?, kind),
            Self::Training => training::steps(&kind.checked()?),
            Self::Fp8 => training::eight_bits(&kind.checked()?),
            Self::Memory => training::memory(&kind.checked()?, kind),
            Self::Nccl => comm::one_rank(kind),
            Self::AllDevices => comm::all_devices(kind),
        }
    }
}

/// Runs the checks, and prints a line for each check. The exit code is 0 if all checks pass.
pub fn run(args: &CheckGpuArgs) -> Result<ExitCode, Error> {
    if let Some(check) = args.run {
        let findings = check.run(args.device)?;
        println!("{}", serde_json::to_string(&findings)?);
        return Ok(ExitCode::SUCCESS);
    }
    let limit = seconds("timeout", args.timeout)?;
    let mut report = Report::new(args.device.to_string(), is_unchecked());
    println!("{}", report.header());
    for check in Check::value_variants() {
        if !args.only.is_empty() && !args.only.contains(check) {
            continue;
        }
        let result = match report.obstacle.clone().filter(|_| check.computes()) {
            Some(obstacle) => CheckResult::not_run(check.name(), obstacle),
            None => one(*check, args, limit)?,
        };
        if result.verdict == Verdict::Fail && !check.computes() && report.obstacle.is_none() {
            report.obstacle = Some(check.obstacle(&result).into());
        }
        print!("{}", result.lines());
        report.add(result);
        if let Some(path) = &args.json {
            let text = serde_json::to_vec_pretty(&report)?;
            replace_file(path, &text)
                .map_err(|error| format!("cannot write {}: {error}", path.display()))?;
        }
    }
    println!("{}", report.summary());
    Ok(match report.ok {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

/// Runs a check in a separate process.
fn one(check: Check, args: &CheckGpuArgs, limit: Duration) -> Result<CheckResult, Error> {
    let device = args.device.to_string();
    let arguments = ["check-gpu", "--device", &device, "--run", &check.name()];
    let (findings, elapsed) = child::findings(&arguments, limit)?;
    Ok(CheckResult::new(
        check.name(),
        findings,
        elapsed,
        is_unchecked(),
    ))
}
