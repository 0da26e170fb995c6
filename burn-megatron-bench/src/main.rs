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
    /// Time each kernel, and compare it with the composition of Burn's operations and with a copy of the same number of
    /// bytes.
    Kernels(kernels::args::KernelBenchArgs),
    /// Time matrix products on the CPU with the gemm crate and with each BLAS library that can be loaded, to find the
    /// fastest `kernels.gemm` on this machine.
    Gemm(gemm::GemmBenchArgs),
    /// Time training steps of a model on one device: tokens per second, model FLOPs utilization (MFU) and memory, for
    /// each form of attention.
    Step(step::args::StepBenchArgs),
    /// Time the host for a micro-batch and for a collective. The device must have less work than the host, as on the
    /// stub in tools/stub-cuda.
    Host(host::HostBenchArgs),
    /// Time greedy generation on the CPU in tokens per second, in alternation with transformers.
    Generate(generate::GenerateBenchArgs),
    /// Measure the share of the data-parallel communication that is hidden behind computation. Trains a GPT over a
    /// simulated slow link, for each ZeRO stage with and without overlap.
    Overlap(overlap::args::OverlapArgs),
    /// Time pipeline schedules over a simulated link, and compare them with the simulator. The hidden share of the
    /// transfers depends on the number of receives that are posted ahead and on the length of the warm-up.
    Pipeline(pipeline::PipelineBenchArgs),
    /// Time an attention layer whose sequence is split over several ranks, and compare it with one rank.
    Context(context::ContextArgs),
    /// Time a layer of experts on several ranks and nodes with each dispatcher: the bytes that it sends, and the share
    /// that is hidden.
    Dispatch(dispatch::DispatchArgs),
    /// Compare planned times of layouts with measured times, on the CPU of this machine.
    Plan(plan::PlanBenchArgs),
    /// Time the tokenization of `preprocess` in megabytes of text per second. The baseline is the tokenizers library
    /// with the same number of threads and the text in memory.
    Preprocess(preprocess::PreprocessBenchArgs),
    /// Time the saving and loading of checkpoints, and compare it with a copy and a read of the same bytes. Also
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
