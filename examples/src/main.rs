//! The `burn-megatron` command.

mod bench;
mod cli;
mod env;
mod header;
mod interrupt;
mod pretrain;
mod rank_run;
mod recipe;
mod record;
mod schedule;
mod sharing;
mod verify;

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::Parser;

use cli::{BenchCommand, Cli, Command};

fn main() -> ExitCode {
    let cli = Cli::parse();
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::new(cli.log_level.filter()))
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        // A rank's threads carry its number.
        .with_thread_names(true)
        .with_span_events(cli.log_level.span_events())
        .init();
    let result = match &cli.command {
        Command::Pretrain(args) => pretrain::run(args),
        Command::Verify(args) => verify::run(args),
        Command::Schedule(args) => schedule::run(args),
        Command::Env(args) => env::run(args),
        Command::Bench(BenchCommand::Kernels(args)) => bench::run(args),
        Command::Bench(BenchCommand::Overlap(args)) => bench::overlap::run(args),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
