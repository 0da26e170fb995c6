//! The `burn-megatron-bench` command: the benchmarks of burn-megatron.

use std::process::ExitCode;

use burn_megatron_cli::internal::{Error, LogArgs, MAX_COLUMNS, run_program};
use clap::{Parser, Subcommand};

/// Prints to standard output. Unlike the macro of the standard library, it ignores a closed pipe.
macro_rules! print {
    ($($text:tt)*) => { burn_megatron_cli::internal::write(format_args!($($text)*)) };
}

/// Prints a line to standard output.
macro_rules! println {
    ($($text:tt)*) => { print!("{}\n", format_args!($($text)*)) };
}

mod args;
mod checkpoint;
mod context;
mod dispatch;
mod gemm;
mod generate;
mod host;
mod kernels;
mod layers;
mod links;
mod overlap;
mod peer;
mod pipeline;
mod plan;
mod preprocess;
mod report;
mod step;
mod svg;
#[cfg(test)]
mod test_flags;
mod timeline;

/// The same allocator as in the `burn-megatron` command, so that both need the same time on the host.
#[cfg(feature = "cuda")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Benchmarks of burn-megatron.
#[derive(Parser)]
#[command(name = "burn-megatron-bench", version, max_term_width = MAX_COLUMNS)]
struct Bench {
    #[command(subcommand)]
    command: Command,
    /// The log.
    #[command(flatten)]
    log: LogArgs,
}

/// The benchmarks.
#[derive(Subcommand)]
enum Command {
    /// Time each fused kernel, and compare it with the same computation in separate Burn operations and with a copy of
    /// the same number of bytes.
    Kernels(kernels::args::KernelBenchArgs),
    /// Time matrix multiplications on the CPU with the gemm crate and with each BLAS library that can be loaded. The
    /// result shows the fastest value of `kernels.gemm` on this machine.
    Gemm(gemm::GemmBenchArgs),
    /// Time training steps of a model on one device. Reports tokens per second, model FLOPs utilization (MFU) and
    /// memory, for each implementation of attention.
    Step(step::args::StepBenchArgs),
    /// Measure the time that the host needs to launch a micro-batch or a collective. The device must need less time
    /// than the host, as with the CUDA stub in tools/stub-cuda.
    Host(host::HostBenchArgs),
    /// Measure the speed of greedy text generation on the CPU in tokens per second, in alternation with transformers.
    Generate(generate::GenerateBenchArgs),
    /// Measure the share of the data-parallel communication that overlaps with computation. Trains a GPT over a
    /// simulated slow link, for each ZeRO stage with and without overlap.
    Overlap(overlap::args::OverlapArgs),
    /// Time pipeline schedules over a simulated link, and compare them with the schedule simulator. The share of the
    /// transfers that overlaps with computation depends on the number of receives that are posted ahead, and on the
    /// length of the pipeline warm-up.
    Pipeline(pipeline::PipelineBenchArgs),
    /// Time an attention layer with context parallelism on several ranks, and compare it with one rank.
    Context(context::ContextArgs),
    /// Time a mixture-of-experts layer on several ranks and nodes with each dispatcher. Reports the number of bytes
    /// that are sent, and the share of the transfers that overlaps with computation.
    Dispatch(dispatch::DispatchArgs),
    /// Compare the planned step times of parallel layouts with measured step times, on the CPU of this machine.
    Plan(plan::PlanBenchArgs),
    /// Measure the speed of tokenization with `preprocess` in megabytes of text per second. The baseline is the
    /// tokenizers library with the same number of threads, reading the text from memory.
    Preprocess(preprocess::PreprocessBenchArgs),
    /// Time saving and loading checkpoints, and compare them with copying and reading the same number of bytes. Also
    /// measures how much asynchronous saving slows training down.
    Checkpoint(checkpoint::CheckpointBenchArgs),
}

fn main() -> ExitCode {
    let bench = Bench::parse();
    run_program(&bench.log, || {
        run(&bench.command).map(|()| ExitCode::SUCCESS)
    })
}

fn run(command: &Command) -> Result<(), Error> {
    match command {
        Command::Kernels(args) => kernels::run(args),
        Command::Gemm(args) => gemm::run(args),
        Command::Step(args) => step::run(args),
        Command::Host(args) => host::run(args),
        Command::Generate(args) => generate::run(args),
        Command::Overlap(args) => overlap::run(args),
        Command::Pipeline(args) => pipeline::run(args),
        Command::Context(args) => context::run(args),
        Command::Dispatch(args) => dispatch::run(args),
        Command::Plan(args) => plan::run(args),
        Command::Preprocess(args) => preprocess::run(args),
        Command::Checkpoint(args) => checkpoint::run(args),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_flags_are_consistent() {
        Bench::command().debug_assert();
    }
}
