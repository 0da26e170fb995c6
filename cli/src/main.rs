//! The `burn-megatron` command.

use std::process::ExitCode;

use burn_megatron_cli::CommandLine;

/// A rank on a GPU allocates thousands of small blocks for each micro-batch, which the thread of its device frees. glibc's
/// allocator takes a third of the host's time for that: see `burn-megatron-bench host`.
#[cfg(feature = "cuda")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    CommandLine::default().run()
}
