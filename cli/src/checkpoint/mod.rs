//! Implements `burn-megatron checkpoint`.

pub mod args;
mod diff;
mod inspect;
mod reshard;
mod upcycle;
mod verify;

use std::process::ExitCode;

use burn_megatron::checkpoint::Checkpoint;
use indicatif::ProgressBar;

use crate::error::Error;
use crate::family::Families;
use crate::terminal::bar_style;
use args::CheckpointCommand;

/// Runs a `checkpoint` command.
pub fn run(command: &CheckpointCommand, families: &Families) -> Result<ExitCode, Error> {
    match command {
        CheckpointCommand::Inspect(args) => inspect::run(args),
        CheckpointCommand::Diff(args) => Ok(diff::run(args)),
        CheckpointCommand::Reshard(args) => reshard::run(args),
        CheckpointCommand::Verify(args) => verify::run(args),
        CheckpointCommand::Upcycle(args) => upcycle::run(args, families),
    }
}

/// Returns a progress bar in bytes, which is hidden without a terminal.
fn bar(bytes: u64) -> ProgressBar {
    let template = "{bytes}/{total_bytes} {bar:30.cyan/blue} {bytes_per_sec}  ETA {eta}";
    ProgressBar::new(bytes).with_style(bar_style(template))
}

/// Returns the total bytes of all tensors.
fn tensor_bytes(checkpoint: &Checkpoint) -> u64 {
    let tensors = checkpoint.manifest().tensors.iter();
    tensors.map(bytes_of).sum()
}

fn bytes_of(tensor: &burn_megatron::checkpoint::TensorEntry) -> u64 {
    // Opening a checkpoint checks the sizes.
    tensor.meta().bytes().unwrap_or(usize::MAX) as u64
}
