//! Implements `burn-megatron checkpoint verify`.

use std::process::ExitCode;

use burn_megatron::checkpoint::Checkpoint;
use indicatif::HumanBytes;

use super::args::VerifyArgs;
use super::bar;
use crate::error::Error;
use crate::numbers::count;

/// Verifies a checkpoint, and prints the files that have changed.
pub fn run(args: &VerifyArgs) -> Result<ExitCode, Error> {
    let checkpoint = Checkpoint::open(&args.path)?;
    let totals = checkpoint.totals();
    let bar = bar(totals.bytes);
    let faults = checkpoint.faults(&mut |bytes| bar.inc(bytes));
    bar.finish_and_clear();
    let path = checkpoint.path().display();
    if faults.is_empty() {
        println!(
            "{path}: {} in {}, {}, all as written",
            count(totals.tensors, "tensor"),
            count(totals.files, "file"),
            HumanBytes(totals.bytes)
        );
        return Ok(ExitCode::SUCCESS);
    }
    for fault in &faults {
        eprintln!("error: {fault}");
    }
    eprintln!("{path}: {}", count(faults.len(), "fault"));
    Ok(ExitCode::FAILURE)
}
