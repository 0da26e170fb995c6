//! The `burn-megatron-bench` command: the benchmarks of burn-megatron.

use std::process::ExitCode;

use burn_megatron_cli::internal::{Error, LogArgs, MAX_COLUMNS, run_program};
use clap::{Parser, Subcommand};

/// Prints to standard output. Unlike the macro of the standard library, it ignores a closed pipe.
macro_rules! print {
    ($($text:tt)*) => { burn_megatron_cli::internal::write(format_args!($($text)*)) };
}

/// The same with an end of line.
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

/// As in the `burn-megatron` command, so that both need the same time on the host.
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
    /// Each kernel, compared with the composition of Burn's operations and with a copy of the same number of bytes.
    Kernels(kernels::args::KernelBenchArgs),
    /// Matrix products on the CPU by the gemm crate and by each BLAS library that can be opened: which `kernels.gemm` is the
    /// fastest here.
    Gemm(gemm::GemmBenchArgs),
    /// Training steps of a model on one device, by the trainer: tokens per second, model FLOPs utilisation (MFU) and
    /// memory, for each form of attention.
    Step(step::args::StepBenchArgs),
    /// Time of the host for a micro-batch and for a collective. The device must have less work than the host, as on the
    /// stub in tools/stub-cuda.
    Host(host::HostBenchArgs),
    /// Tokens per second of greedy generation on the CPU, in turns with transformers.
    Generate(generate::GenerateBenchArgs),
    /// The share of the data-parallel communication that is hidden behind computation, in a GPT that is trained over a
    /// simulated slow link, for each ZeRO stage with and without overlap.
    Overlap(overlap::args::OverlapArgs),
    /// The time of pipeline schedules over a simulated link, against the simulator: how many receives are posted ahead, and
    /// how long the warm-up is, decide how much of the transfers is hidden.
    Pipeline(pipeline::PipelineBenchArgs),
    /// A layer of attention whose sequence is shared by several ranks, against one rank.
    Context(context::ContextArgs),
    /// A layer of experts on several ranks and nodes by each dispatcher: what it sends, and how much of that is hidden.
    Dispatch(dispatch::DispatchArgs),
    /// Planned times of layouts against measured ones, on the CPU of this machine.
    Plan(plan::PlanBenchArgs),
    /// Megabytes of text per second that `preprocess` tokenizes, compared with the tokenizers library alone
    /// with the same number of threads and the text in memory.
    Preprocess(preprocess::PreprocessBenchArgs),
    /// The speed of saving and loading checkpoints, compared with a copy and a read of the same bytes, and how
    /// much asynchronous saving slows training down.
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
