//! Runs the launcher, from the flags to the exit code.

use std::env;
use std::process::ExitCode;

use super::args::LaunchArgs;
use super::error::LaunchError;
use super::plan::{LaunchPlan, Starter};
use super::restart;
use super::restart::job::PretrainJob;
use super::signals::TerminationSignals;
use super::world::{self, Attempt};
use crate::error::Error;
use crate::family::Families;

/// The commands of this program whose ranks communicate.
const WITH_RANKS: [&str; 3] = ["pretrain", "generate", "conformance"];

/// Starts the ranks and waits until they end. Restarts the job if restarts are requested. Returns the exit code of
/// the run.
pub fn run(
    args: &LaunchArgs,
    families: &Families,
    default_recipe: &str,
) -> Result<ExitCode, Error> {
    let plan = LaunchPlan::new(args, &|name| env::var_os(name));
    let plan = plan.and_then(|plan| check_compiled(args, plan));
    let ended = plan.and_then(|plan| launch(args, plan, families, default_recipe));
    let code = ended.unwrap_or_else(|error| {
        eprintln!("error: {error}");
        error.exit_code()
    });
    Ok(ExitCode::from(code))
}

/// Checks that this program contains the engine of its ranks, before any process is started.
fn check_compiled(args: &LaunchArgs, plan: LaunchPlan) -> Result<LaunchPlan, LaunchError> {
    let first = args.command.first().and_then(|word| word.to_str());
    let has_ranks = first.is_some_and(|word| WITH_RANKS.contains(&word));
    let (feature, is_compiled) = match plan.starter {
        Starter::Spawn { .. } => ("cuda", cfg!(feature = "cuda")),
        Starter::Mpirun { .. } => ("mpi", cfg!(feature = "mpi")),
    };
    if args.program.is_none() && has_ranks && !is_compiled {
        let engine = plan.engine();
        return Err(LaunchError::NotCompiled { engine, feature });
    }
    Ok(plan)
}

fn launch(
    args: &LaunchArgs,
    plan: LaunchPlan,
    families: &Families,
    default_recipe: &str,
) -> Result<u8, LaunchError> {
    // This must come before any other thread, because threads inherit the signal mask.
    let signals = TerminationSignals::listen(args.grace)?;
    if args.max_restarts == 0 {
        let end = world::run(args, &plan, &Attempt::first(), &signals)?;
        return Ok(end.code);
    }
    let job = PretrainJob::of(args, families, default_recipe)?;
    restart::run(args, plan, job.as_ref(), &signals)
}
