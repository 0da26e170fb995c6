//! Starts a job again after a failure that may pass: `--max-restarts`.
//!
//! Each attempt is a world of its own, with another token and id, and begins after all processes of the one before have
//! ended. [`verdict`] says why a world ended, [`policy`] what follows.

pub mod job;
mod policy;
mod record;
mod verdict;

use std::time::{Duration, Instant};

use burn_megatron::comm::Token;

use super::args::LaunchArgs;
use super::error::LaunchError;
use super::exit_status::{RankExitStatus, signal_name};
use super::plan::LaunchPlan;
use super::signals::TerminationSignals;
use super::world::{self, Attempt, RunResult};
use job::{Job, PretrainJob, Progress};
use policy::{Decision, Failure, RestartPolicy};
use record::{AttemptLog, AttemptRecord};
use verdict::Verdict;

/// The time before the first restart, by default.
const DEFAULT_DELAY: Duration = Duration::from_secs(1);

/// Runs the worlds of a job until it is complete or must not be started again; returns the exit code.
pub fn run(
    args: &LaunchArgs,
    plan: LaunchPlan,
    job: &Job,
    signals: &TerminationSignals,
) -> Result<u8, LaunchError> {
    let mut restarts = Restarts {
        args,
        job,
        signals,
        policy: RestartPolicy::new(
            args.max_restarts,
            args.restart_delay
                .map_or(DEFAULT_DELAY, Duration::from_secs_f64),
        ),
        log: AttemptLog::new(job.pretrain().map(|job| job.folder().as_path())),
    };
    let ended = restarts.run(plan);
    if let Some(table) = restarts.log.summary() {
        eprintln!("{table}");
    }
    ended
}

struct Restarts<'a> {
    args: &'a LaunchArgs,
    job: &'a Job,
    signals: &'a TerminationSignals,
    policy: RestartPolicy,
    log: AttemptLog,
}

/// Where an attempt begins and ends.
#[derive(Clone, Copy, Default)]
struct Steps {
    /// The step of the checkpoint that it resumes from, 0 for none.
    from: u64,
    before: Progress,
}

impl Restarts<'_> {
    fn run(&mut self, mut plan: LaunchPlan) -> Result<u8, LaunchError> {
        let mut attempt = Attempt::first();
        let given = plan.command.clone();
        loop {
            let steps = self.steps()?;
            let began = Instant::now();
            let result = world::run(self.args, &plan, &attempt, self.signals)?;
            let next = self.after(&result, steps)?;
            self.record(&attempt, &plan, &result, (steps, began), &next);
            let Decision::Restart { number, delay } = next.decision else {
                return Ok(result.code);
            };
            eprintln!(
                "restart {number} of {} in {:.1} s{}",
                self.args.max_restarts,
                delay.as_secs_f64(),
                next.from
                    .map_or(String::new(), |step| format!(" from step {step}")),
            );
            if let Some(signal) = self.signals.wait(delay) {
                eprintln!("stopped by {}", signal_name(signal));
                return Ok(RankExitStatus::Signal(signal).exit_code());
            }
            attempt = attempt.next();
            // What is left of the world before, if anything, cannot join this one.
            plan.token =
                Token::random().map_err(LaunchError::system("no token can be generated"))?;
            plan.command.truncate(1);
            plan.command.extend(self.job.restart_command(&given[1..]));
        }
    }

    /// Where the next attempt begins.
    fn steps(&self) -> Result<Steps, LaunchError> {
        let Some(job) = self.job.pretrain() else {
            return Ok(Steps::default());
        };
        Ok(Steps {
            from: job.saved()?.unwrap_or(0),
            before: job.progress(),
        })
    }

    /// Decides what follows the end of a world, and prints why.
    fn after(&mut self, result: &RunResult, steps: Steps) -> Result<Next, LaunchError> {
        let verdict = Verdict::of(result);
        let job = self.job.pretrain();
        let to = job.map(|job| steps_of(job, steps));
        let none = |decision| Next {
            verdict,
            to,
            from: None,
            decision,
        };
        if verdict == Verdict::Complete {
            return Ok(none(Decision::Stop("complete".into())));
        }
        let saved = match job.map(PretrainJob::saved).transpose() {
            Ok(saved) => saved.flatten(),
            Err(error) => {
                eprintln!("not restarted: {error}");
                return Ok(none(Decision::Stop(error.to_string())));
            }
        };
        let decision = self.policy.decide(&Failure {
            verdict,
            message: result.report.as_deref().unwrap_or_default(),
            step: to.map(|step| step + 1),
            saved,
        });
        match (&decision, to) {
            (Decision::Stop(why), _) => eprintln!("not restarted: {why}"),
            (_, Some(to)) => eprintln!("in step {}: {verdict}", to + 1),
            (_, None) => eprintln!("{verdict}"),
        }
        Ok(Next {
            verdict,
            to,
            from: job.map(|_| saved.unwrap_or(0)),
            decision,
        })
    }

    fn record(
        &mut self,
        attempt: &Attempt,
        plan: &LaunchPlan,
        result: &RunResult,
        (steps, began): (Steps, Instant),
        next: &Next,
    ) {
        let is_run = next.to.is_some();
        let cause = result.summary.first().map_or("complete", String::as_str);
        self.log.add(AttemptRecord {
            attempt: attempt.number,
            job: attempt.job.clone(),
            ranks: plan.ranks,
            from_step: is_run.then_some(steps.from),
            to_step: next.to,
            seconds: began.elapsed().as_secs_f64(),
            verdict: next.verdict.name(),
            cause: cause.to_owned(),
            report: result.report.clone(),
            next: match &next.decision {
                Decision::Restart { number, .. } => format!("restart {number}"),
                Decision::Stop(why) => why.clone(),
            },
        });
    }
}

/// The consequence of the end of a world.
struct Next {
    verdict: Verdict,
    /// The step after which it ended.
    to: Option<u64>,
    /// The step from which the next one begins.
    from: Option<u64>,
    decision: Decision,
}

/// The step after which an attempt ended: that of its checkpoint, if it made none.
fn steps_of(job: &PretrainJob, steps: Steps) -> u64 {
    let now = job.progress();
    if now.metrics_bytes == steps.before.metrics_bytes {
        steps.from
    } else {
        now.steps.max(steps.from)
    }
}
