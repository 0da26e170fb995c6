//! Checks NCCL with the suite of `conformance`.

use std::time::Duration;

use burn_megatron::device::DeviceKind;

use super::child::output;
use super::outcome::Findings;
use crate::error::Error;

/// The time limit of the suite, which is below the time limit of the check.
const LIMIT: Duration = Duration::from_secs(100);

/// The number of random programs, which is below the default of `conformance`.
const PROGRAMS: &str = "20";

/// Checks one rank.
pub fn one_rank(kind: DeviceKind) -> Result<Findings, Error> {
    suite(kind, 1)
}

/// Checks one rank per device.
pub fn all_devices(kind: DeviceKind) -> Result<Findings, Error> {
    let devices = match kind {
        DeviceKind::Cuda => kind.devices()?.len(),
        DeviceKind::Cpu | DeviceKind::Wgpu => 1,
    };
    match devices {
        0 | 1 => Ok(Findings::not_run("the machine has one device")),
        count => suite(kind, count),
    }
}

/// Runs the suite on ranks that are processes.
fn suite(kind: DeviceKind, ranks: usize) -> Result<Findings, Error> {
    if kind != DeviceKind::Cuda {
        return Ok(Findings::not_run(format!(
            "NCCL is for cuda devices, not {kind}"
        )));
    }
    let ranks = ranks.to_string();
    let launch = ["launch", "--ranks", &ranks, "--engine", "nccl", "--"];
    let suite = ["conformance", "--engine", "nccl", "--programs", PROGRAMS];
    let text = output(&[&launch[..], &suite].concat(), LIMIT)?;
    let mut found = Findings::default();
    match text {
        Ok(text) => found.note("conformance", text.lines().last().unwrap_or_default()),
        Err(reason) => found.push("conformance", "failed", Some(reason)),
    }
    Ok(found)
}
