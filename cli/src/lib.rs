//! The `burn-megatron` command: its `main`, and the recipes that it reads.

// First, as its macros are for all that follow.
#[macro_use]
mod out;

mod agree;
mod bench;
mod changes;
mod checkpoint;
mod cli;
mod compare;
mod conformance;
mod convert;
mod data;
mod env;
mod fp8;
mod generate;
mod header;
mod interrupt;
mod launch;
mod outline;
mod preprocess;
mod pretrain;
mod rank_run;
mod ranks;
mod reading;
mod recipe;
mod record;
mod saving;
mod schedule;
mod sharing;
mod start;
mod trace;
mod verify;
mod way;
mod weights;

use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use burn_megatron::comm::WorldError;
use clap::Parser;

use cli::{BenchCommand, Cli, Command};
use recipe::{Error, Recipe};

/// The recipe of this text, in TOML, as far as it can be read and its ranks can be laid out: what is
/// wrong with it otherwise.
///
/// # Errors
///
/// A message that names the key and what would fit.
pub fn check_recipe(text: &str) -> Result<(), Error> {
    toml::from_str::<Recipe>(text)?.plan()?;
    Ok(())
}

/// Runs the command of the command line, and gives its exit code.
pub fn main() -> ExitCode {
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
        Command::Preprocess(args) => preprocess::run(args),
        Command::Generate(args) => generate::run(args),
        Command::Launch(args) => launch::run(args),
        Command::LaunchKeeper(args) => launch::keeper::run(args),
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
    if code == ExitCode::SUCCESS && !out::finish() {
        return ExitCode::FAILURE;
    }
    code
}

/// Shows the error, unless it was shown for all ranks, and gives its exit code.
fn fail(error: &(dyn std::error::Error + Send + Sync + 'static)) -> ExitCode {
    let of_world = error.downcast_ref::<WorldError>();
    if !of_world.is_some_and(WorldError::is_told) {
        // In one piece: several processes may write at once.
        let _ = std::io::stderr().write_all(format!("error: {error}\n").as_bytes());
    }
    match of_world {
        Some(error) => ExitCode::from(error.exit_code()),
        None => ExitCode::FAILURE,
    }
}
