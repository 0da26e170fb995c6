//! Decides whether and when a failed job is restarted. This is pure logic, without processes or clocks.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::verdict::Verdict;

/// The number of failures at the same step after which the job is not restarted.
const STEP_FAILURES: usize = 3;
/// The maximum delay before a restart, unless the first delay is longer.
const MAX_DELAY: Duration = Duration::from_secs(60);

/// Failure, as input of the decision.
#[derive(Clone, Copy, Debug)]
pub struct Failure<'a> {
    pub verdict: Verdict,
    /// The report of the rank that failed.
    pub message: &'a str,
    /// The step that failed, from 1, if it is known.
    pub step: Option<u64>,
    /// The step of the newest checkpoint, or `None` without a checkpoint.
    pub saved: Option<u64>,
}

/// Decision after a failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Restart with this number, from 1, after this delay.
    Restart { number: usize, delay: Duration },
    /// Do not restart, for this reason.
    Stop(String),
}

/// Policy for the restarts of a job.
#[derive(Debug)]
pub struct RestartPolicy {
    max: usize,
    first_delay: Duration,
    made: usize,
    /// The number of consecutive restarts without a new checkpoint.
    without_progress: u32,
    saved: Option<u64>,
    failed_steps: BTreeMap<u64, usize>,
    panics: BTreeSet<String>,
}

impl RestartPolicy {
    /// Creates a policy with at most `max` restarts, the first after `first_delay`. The delay doubles with each
    /// further restart without a new checkpoint.
    pub fn new(max: usize, first_delay: Duration) -> Self {
        Self {
            max,
            first_delay,
            made: 0,
            without_progress: 0,
            saved: None,
            failed_steps: BTreeMap::new(),
            panics: BTreeSet::new(),
        }
    }

    /// Decides whether to restart after a failure.
    pub fn decide(&mut self, failure: &Failure) -> Decision {
        let times = failure.step.map(|step| {
            let times = self.failed_steps.entry(step).or_default();
            *times += 1;
            (step, *times)
        });
        let stop = |why: &str| Decision::Stop(why.to_owned());
        match (failure.verdict, times) {
            (verdict, _) if !verdict.may_pass() => return stop(&verdict.to_string()),
            (Verdict::Panic, _) if !self.panics.insert(without_numbers(failure.message)) => {
                return stop("the same panic again, which is a defect");
            }
            (_, Some((step, STEP_FAILURES..))) => {
                return Decision::Stop(format!("step {step} has failed {STEP_FAILURES} times"));
            }
            _ if self.made == self.max => {
                return Decision::Stop(match self.max {
                    1 => "the restart of --max-restarts 1 is used up".into(),
                    max => format!("the {max} restarts of --max-restarts are used up"),
                });
            }
            _ => {}
        }
        if failure.saved > self.saved {
            self.saved = failure.saved;
            self.without_progress = 0;
        }
        let doubled = 2u32.saturating_pow(self.without_progress);
        let delay = self.first_delay.saturating_mul(doubled);
        self.without_progress += 1;
        self.made += 1;
        Decision::Restart {
            number: self.made,
            delay: delay.min(MAX_DELAY.max(self.first_delay)),
        }
    }
}

/// Removes the numbers from a message, because a panic at the same place may report other sizes.
fn without_numbers(message: &str) -> String {
    message.replace(|c: char| c.is_ascii_digit(), "")
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn failure(verdict: Verdict, step: u64, saved: u64) -> Failure<'static> {
        Failure {
            verdict,
            message: "rank 1 failed: panicked: index 7 of 3",
            step: Some(step),
            saved: Some(saved),
        }
    }

    fn stops(decision: Decision, why: &str) {
        assert_eq!(decision, Decision::Stop(why.into()));
    }

    #[test]
    fn the_time_doubles_until_there_is_a_new_checkpoint() {
        let mut policy = RestartPolicy::new(100, SECOND);
        let mut delay = |step, saved| match policy.decide(&failure(Verdict::Signal, step, saved)) {
            Decision::Restart { delay, .. } => delay.as_secs(),
            Decision::Stop(why) => panic!("{why}"),
        };
        let steps = 11..20;
        let delays: Vec<_> = steps.map(|step| delay(step, 10)).collect();
        assert_eq!(delays, [1, 2, 4, 8, 16, 32, 60, 60, 60]);
        assert_eq!([delay(21, 20), delay(22, 20), delay(31, 30)], [1, 2, 1]);
        let mut slow = RestartPolicy::new(1, 90 * SECOND);
        let restart = slow.decide(&failure(Verdict::Lost, 1, 0));
        let (number, delay) = (1, 90 * SECOND);
        assert_eq!(restart, Decision::Restart { number, delay });
    }

    #[test]
    fn what_would_occur_again_is_not_started_again() {
        for verdict in [Verdict::Interrupted, Verdict::Usage, Verdict::Error] {
            let mut policy = RestartPolicy::new(3, SECOND);
            stops(policy.decide(&failure(verdict, 1, 0)), &verdict.to_string());
            assert_eq!(policy.made, 0);
        }
    }

    #[test]
    fn a_step_fails_three_times_at_most() {
        let mut policy = RestartPolicy::new(9, SECOND);
        for step in [13, 14, 13] {
            let decision = policy.decide(&failure(Verdict::Signal, step, 10));
            assert!(matches!(decision, Decision::Restart { .. }), "{decision:?}");
        }
        let third = policy.decide(&failure(Verdict::Lost, 13, 10));
        stops(third, "step 13 has failed 3 times");
        // A program other than `pretrain` has no steps.
        let unknown = Failure {
            step: None,
            saved: None,
            ..failure(Verdict::Signal, 0, 0)
        };
        let mut policy = RestartPolicy::new(4, SECOND);
        for number in 1..=4 {
            let decision = policy.decide(&unknown);
            assert!(matches!(decision, Decision::Restart { number: n, .. } if n == number));
        }
        let used_up = "the 4 restarts of --max-restarts are used up";
        stops(policy.decide(&unknown), used_up);
    }

    #[test]
    fn the_same_panic_twice_is_a_defect() {
        let mut policy = RestartPolicy::new(9, SECOND);
        let first = failure(Verdict::Panic, 3, 0);
        let other = Failure {
            message: "rank 0 failed: panicked: another",
            ..first
        };
        for panic in [first, other] {
            assert!(matches!(policy.decide(&panic), Decision::Restart { .. }));
        }
        let again = Failure {
            message: "rank 2 failed: panicked: index 14 of 3",
            ..failure(Verdict::Panic, 8, 5)
        };
        stops(
            policy.decide(&again),
            "the same panic again, which is a defect",
        );
    }
}
