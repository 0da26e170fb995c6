//! Restarts a job after a transient failure: `--max-restarts`.
//!
//! Each attempt has its own world, with a new token and id. It begins after all processes of the previous attempt
//! have ended. [`verdict`] determines why a world ended, and [`policy`] decides whether to restart.

pub mod job;
mod policy;
mod record;
mod verdict;

use std::time::{Duration, Instant};

use burn_megatron::comm::Token;
use tempfile::NamedTempFile;

use super::args::LaunchArgs;
use super::error::LaunchError;
use super::exit_status::{RankExitStatus, signal_name};
use super::plan::LaunchPlan;
use super::signals::TerminationSignals;
use super::world::{self, Attempt, RunResult};
use job::PretrainJob;
use policy::{Decision, Failure, RestartPolicy};
use record::{AttemptLog, AttemptRecord};
use verdict::Verdict;

/// The default time before the first restart.
const DEFAULT_DELAY: Duration = Duration::from_secs(1);

/// Runs the worlds of a job until it is complete or must not be restarted. Returns the exit code.
pub fn run(
    args: &LaunchArgs,
    plan: LaunchPlan,
    job: Option<&PretrainJob>,
    signals: &TerminationSignals,
) -> Result<u8, LaunchError> {
    let delay = args
        .restart_delay
        .map_or(DEFAULT_DELAY, Duration::from_secs_f64);
    let mut restarts = Restarts {
        args,
        job,
        signals,
        policy: RestartPolicy::new(args.max_restarts, delay),
        log: AttemptLog::new(job.map(|job| job.folder().as_path())),
    };
    let ended = restarts.run(plan);
    if let Some(table) = restarts.log.summary() {
        eprintln!("{table}");
    }
    ended
}

struct Restarts<'a> {
    args: &'a LaunchArgs,
    /// The job, or `None` for a program that resumes automatically.
    job: Option<&'a PretrainJob>,
    signals: &'a TerminationSignals,
    policy: RestartPolicy,
    log: AttemptLog,
}

impl Restarts<'_> {
    fn run(&mut self, mut plan: LaunchPlan) -> Result<u8, LaunchError> {
        let mut attempt = Attempt::first();
        let given = plan.command[1..].to_vec();
        // Keeps the recipe file while the attempt that reads it is running.
        let mut recipe: Option<NamedTempFile> = None;
        loop {
            let before = self.job.map(PretrainJob::progress).transpose()?;
            let began = Instant::now();
            let result = world::run(self.args, &plan, &attempt, self.signals)?;
            let verdict = Verdict::of(&result);
            let to_step = self
                .job
                .zip(before)
                .map(|(job, before)| job.last_step(before));
            let (decision, saved) = self.decide(&result, verdict, to_step);
            let cause = result.summary.first().map_or("complete", String::as_str);
            self.log.add(AttemptRecord {
                attempt: attempt.number,
                job: attempt.job(),
                ranks: plan.ranks,
                from_step: before.map(|before| before.saved),
                to_step,
                seconds: began.elapsed().as_secs_f64(),
                verdict: verdict.name(),
                cause: cause.to_owned(),
                report: result.report.clone(),
                next: match &decision {
                    Decision::Restart { number, .. } => format!("restart {number}"),
                    Decision::Stop(why) => why.clone(),
                },
            });
            let Decision::Restart { number, delay } = decision else {
                return Ok(result.code);
            };
            let from = match self.job {
                Some(_) => format!(" from step {}", saved.unwrap_or(0)),
                None => String::new(),
            };
            let (most, seconds) = (self.args.max_restarts, delay.as_secs_f64());
            eprintln!("restart {number} of {most} in {seconds:.1} s{from}");
            if let Some(signal) = self.signals.wait(delay) {
                eprintln!("stopped by {}", signal_name(signal));
                return Ok(RankExitStatus::Signal(signal).exit_code());
            }
            attempt.number += 1;
            // With a new token, leftover processes of the previous world cannot join the new world.
            plan.token =
                Token::random().map_err(LaunchError::system("no token can be generated"))?;
            if let Some(job) = self.job {
                let recipe = recipe.insert(job.write_recipe()?);
                plan.command.truncate(1);
                plan.command
                    .extend(job.restart_command(&given, recipe.path()));
            }
        }
    }

    /// Decides whether to restart after a world that ended after the step `to_step`, and prints the reason. Also
    /// returns the step of the newest checkpoint.
    fn decide(
        &mut self,
        result: &RunResult,
        verdict: Verdict,
        to_step: Option<u64>,
    ) -> (Decision, Option<u64>) {
        if verdict == Verdict::Complete {
            return (Decision::Stop("complete".into()), None);
        }
        let saved = match self.job.map(PretrainJob::saved).transpose() {
            Ok(saved) => saved.flatten(),
            Err(error) => {
                eprintln!("not restarted: {error}");
                return (Decision::Stop(error.to_string()), None);
            }
        };
        let decision = self.policy.decide(&Failure {
            verdict,
            message: result.report.as_deref().unwrap_or_default(),
            step: to_step.map(|step| step + 1),
            saved,
        });
        match (&decision, to_step) {
            (Decision::Stop(why), _) => eprintln!("not restarted: {why}"),
            (_, Some(step)) => eprintln!("in step {}: {verdict}", step + 1),
            (_, None) => eprintln!("{verdict}"),
        }
        (decision, saved)
    }
}
