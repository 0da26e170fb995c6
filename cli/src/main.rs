//! The `burn-megatron` command.

use std::process::ExitCode;

use burn_megatron_cli::CommandLine;

/// Allocator of the command with CUDA. A rank on a GPU allocates thousands of small blocks per micro-batch, and its
/// device thread frees them. glibc's allocator takes a third of the host time for these blocks: see
/// `burn-megatron-bench host`.
#[cfg(feature = "cuda")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    CommandLine::default().run()
}
