//! Implements `burn-megatron checkpoint reshard`.

use std::process::ExitCode;

use burn_megatron::checkpoint::{
    Checkpoint, CheckpointFolder, FileSizes, check_output, compare, reshard,
};
use burn_megatron_train::run_folder::CHECKPOINTS;
use indicatif::HumanBytes;

use super::args::ReshardArgs;
use super::{bar, tensor_bytes};
use crate::byte_size::ByteSize;
use crate::error::Error;
use crate::numbers::count;
use crate::resume_mode::is_run_folder;

/// Writes a checkpoint to another folder, and compares the two checkpoints.
pub fn run(args: &ReshardArgs) -> Result<ExitCode, Error> {
    let from = Checkpoint::open(&args.path)?;
    let sizes = match args.max_shard_size {
        Some(ByteSize(bytes)) => FileSizes::MaxBytes(bytes),
        None => FileSizes::Files(args.files),
    };
    check_output(&args.to, &[from.path()])?;
    if is_run_folder(&args.to) {
        let run = args.to.display();
        return Err(format!(
            "invalid DST {run}: it is a run folder, whose checkpoints are in {run}/{CHECKPOINTS}: name that or another folder"
        )
        .into());
    }
    let folder = CheckpointFolder::create(&args.to)?;
    // All bytes pass twice: for the write and for the comparison.
    let bar = bar(2 * tensor_bytes(&from));
    let to = reshard(&from, &folder, sizes, &mut |bytes| bar.inc(bytes))?;
    let comparison = compare(&from, &to, &mut |bytes| bar.inc(bytes))?;
    bar.finish_and_clear();
    if !comparison.is_same() || !same_objects(&from, &to)? {
        let (from, to) = (from.path().display(), to.path().display());
        return Err(format!("{to} differs from {from}").into());
    }
    let totals = to.totals();
    println!(
        "{}: {} in {}, {}, equal to {}",
        to.path().display(),
        count(totals.tensors, "tensor"),
        count(totals.files, "file"),
        HumanBytes(totals.bytes),
        from.path().display()
    );
    Ok(ExitCode::SUCCESS)
}

fn same_objects(from: &Checkpoint, to: &Checkpoint) -> Result<bool, Error> {
    let keys = from.objects();
    if keys != to.objects() {
        return Ok(false);
    }
    for key in keys {
        if from.object(&key)? != to.object(&key)? {
            return Ok(false);
        }
    }
    Ok(true)
}
