//! The steps of a command, with their outcomes and times.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use crate::totals::Totals;

/// The outcome of a step.
#[derive(Debug, PartialEq)]
pub enum Outcome {
    /// The step passed.
    Passed,
    /// The step was skipped for this reason. A skipped step is not a failure.
    Skipped(String),
    /// The step failed for this reason.
    Failed(String),
}

impl From<Result<(), String>> for Outcome {
    fn from(result: Result<(), String>) -> Self {
        match result {
            Ok(()) => Outcome::Passed,
            Err(reason) => Outcome::Failed(reason),
        }
    }
}

struct Step {
    name: &'static str,
    outcome: Outcome,
    time: Duration,
}

/// The steps so far, and the totals of the tests if tests ran.
#[derive(Default)]
pub struct Report {
    steps: Vec<Step>,
    totals: Option<Totals>,
}

impl Report {
    /// Runs one step and records its outcome. The printed heading shows the time so far, for a run that is stopped.
    pub fn step<O: Into<Outcome>>(&mut self, name: &'static str, work: impl FnOnce() -> O) {
        let so_far: Duration = self.steps.iter().map(|step| step.time).sum();
        println!("\n== {name} ({} s so far)", so_far.as_secs());
        let start = Instant::now();
        let outcome = work().into();
        if let Outcome::Skipped(reason) | Outcome::Failed(reason) = &outcome {
            println!("{reason}");
        }
        self.steps.push(Step {
            name,
            outcome,
            time: start.elapsed(),
        });
    }

    /// Records the totals of the tests, which are printed last.
    pub fn set_totals(&mut self, totals: Totals) {
        self.totals = Some(totals);
    }

    /// Prints the table and the totals.
    pub fn finish(self) -> ExitCode {
        print!("\n{}", self.text());
        if self.failed() {
            ExitCode::FAILURE
        } else {
            ExitCode::SUCCESS
        }
    }

    /// Returns the table, and the totals if tests ran.
    pub fn text(&self) -> String {
        let mut text = self.table();
        let Some(totals) = &self.totals else {
            return text;
        };
        let slowest = totals.slowest();
        if !slowest.is_empty() {
            text += &format!("\nthe slowest tests:\n{slowest}");
        }
        text += &format!("\n{}", totals.skip_messages());
        for failure in &totals.failures {
            text += &format!("failed           {failure}\n");
        }
        text + &format!("{totals}\n")
    }

    fn failed(&self) -> bool {
        self.steps
            .iter()
            .any(|step| matches!(step.outcome, Outcome::Failed(_)))
    }

    fn table(&self) -> String {
        let width = self
            .steps
            .iter()
            .map(|step| step.name.len())
            .max()
            .unwrap_or(0)
            .max(4);
        let mut table = format!("{:width$}  {:>9}  result\n", "step", "time");
        for Step {
            name,
            outcome,
            time,
        } in &self.steps
        {
            let time = format!("{:.1} s", time.as_secs_f64());
            let result = match outcome {
                Outcome::Passed => "passed".to_owned(),
                Outcome::Skipped(reason) => format!("skipped: {}", first_line(reason)),
                Outcome::Failed(reason) => format!("FAILED: {}", first_line(reason)),
            };
            table += &format!("{name:width$}  {time:>9}  {result}\n");
        }
        table
    }
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_steps_run_after_a_failure_and_the_table_lists_all() {
        let mut report = Report::default();
        report.step("format", || Err("3 files\nthe first is a.rs".to_owned()));
        report.step("lint", || Ok(()));
        report.step("wgpu", || Outcome::Skipped("no driver".into()));
        for step in &mut report.steps {
            step.time = Duration::from_millis(1260);
        }
        assert!(report.failed());
        let expected = "step         time  result\n\
                        format      1.3 s  FAILED: 3 files\n\
                        lint        1.3 s  passed\n\
                        wgpu        1.3 s  skipped: no driver\n";
        assert_eq!(report.table(), expected);
    }

    #[test]
    fn a_skipped_step_is_not_a_failure() {
        let mut report = Report::default();
        report.step("lint", || Ok(()));
        report.step("wgpu", || Outcome::Skipped("no driver".into()));
        assert!(!report.failed());
    }
}
