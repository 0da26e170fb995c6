//! The `burn-megatron` command.

// First, as all other modules use its macros.
#[macro_use]
mod stdio;

mod bench;
mod checkpoint;
mod cli;
mod compare;
mod conformance;
mod consistency;
mod convert;
mod data;
mod data_parallel;
mod env;
mod error;
mod estimate;
#[cfg(test)]
mod flags;
mod fp8;
mod generate;
mod header;
mod interrupt;
mod launch;
mod parallel_plan;
mod preprocess;
mod pretrain;
mod rank_run;
mod ranks;
mod recipe;
mod record;
mod resume_check;
mod resume_mode;
mod retired;
mod saving;
mod schedule;
mod start;
mod trace;
mod verify;
mod verify_progress;
mod weights;

use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use burn_megatron::comm::WorldError;
use clap::Parser;

use cli::{BenchCommand, Cli, Command};
use error::Error;
use recipe::Recipe;

/// Checks a recipe in TOML: that it can be read, and that its layout is valid.
///
/// # Errors
///
/// The key that is wrong, and what is expected.
pub fn check_recipe(text: &str) -> Result<(), Error> {
    Recipe::parse(text)?.plan()?;
    Ok(())
}

/// The exit code of wrong usage, as with clap.
const USAGE: u8 = 2;

/// Runs the command line, and returns its exit code.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => match retired::explain_flag(&error) {
            Some(renamed) => {
                eprintln!("error: {renamed}");
                return ExitCode::from(USAGE);
            }
            None => error.exit(),
        },
    };
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::new(cli.log_level.filter()))
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        // The names of a rank's threads contain the rank.
        .with_thread_names(true)
        .with_span_events(cli.log_level.span_events())
        .init();
    let result = match &cli.command {
        Command::Pretrain(args) => pretrain::run(args),
        Command::Preprocess(args) => preprocess::run(args),
        Command::Generate(args) => generate::run(args),
        Command::Launch(args) => launch::run(args),
        Command::LaunchSlot => launch::slot::run(),
        Command::Compare(args) => compare::run(args),
        Command::Convert(args) => convert::run(args),
        Command::Verify(args) => verify::run(args),
        Command::Schedule(args) => schedule::run(args),
        Command::Conformance(args) => conformance::run(args),
        Command::Env(args) => env::run(args),
        Command::Checkpoint(command) => checkpoint::run(command),
        Command::Bench(BenchCommand::Kernels(args)) => bench::run(args),
        Command::Bench(BenchCommand::Overlap(args)) => bench::overlap::run(args),
        Command::Bench(BenchCommand::Preprocess(args)) => bench::preprocess::run(args),
        Command::Bench(BenchCommand::Checkpoint(args)) => bench::checkpoint::run(args),
    };
    let code = match result {
        Ok(code) => code,
        Err(error) => fail(&*error),
    };
    if code == ExitCode::SUCCESS && !stdio::finish() {
        return ExitCode::FAILURE;
    }
    code
}

/// Prints the error, unless it was already printed for all ranks, and returns its exit code.
fn fail(error: &(dyn std::error::Error + Send + Sync + 'static)) -> ExitCode {
    let of_world = error.downcast_ref::<WorldError>();
    if !of_world.is_some_and(WorldError::is_reported) {
        // In one piece: several processes may write at once.
        let _ = std::io::stderr().write_all(format!("error: {error}\n").as_bytes());
    }
    match of_world {
        Some(error) => ExitCode::from(error.exit_code()),
        None => ExitCode::FAILURE,
    }
}
