//! The disturbances of a run.

use std::fmt;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::Duration;

use crate::draw::Random;

/// Faults for `--inject` that end or delay a run and do not change its numbers. Faults that need a timeout are last.
const FAULTS: [&str; 11] = [
    "kill",
    "abort",
    "segfault",
    "error",
    "panic",
    "terminate",
    "interrupt",
    "shape",
    "wrong-call",
    "delay:0.3s",
    "drop",
];

/// A disturbance of a run.
#[derive(Clone, Debug, PartialEq)]
pub enum Disturbance {
    /// No disturbance: the run must complete.
    None,
    /// A signal, after a number of steps and an additional delay.
    Signal {
        signal: i32,
        /// The index of the process that gets the signal. A signal to stop goes to the first process.
        whom: usize,
        steps: usize,
        then: Duration,
    },
    /// A fault for `--inject`.
    Fault(String),
}

impl Disturbance {
    /// Draws a disturbance for a run of `steps` steps. `made` steps have been completed.
    pub fn new(random: &mut Random, made: usize, steps: usize, ranks: usize) -> Self {
        match random.below(5) {
            0..=2 => {
                let signal = random.one_of(&[
                    libc::SIGKILL,
                    libc::SIGKILL,
                    libc::SIGKILL,
                    libc::SIGTERM,
                    libc::SIGINT,
                ]);
                // The signal is sent before the first step, at a step, or a little later, as in the middle of a save.
                Self::Signal {
                    signal,
                    whom: random.below(64),
                    steps: (made + random.below(10)).min(steps),
                    then: Duration::from_millis(random.one_of(&[0, 1, 5, 20, 100, 400])),
                }
            }
            _ => {
                let kind = if random.once_in(12) {
                    "drop"
                } else {
                    random.one_of(&FAULTS[..FAULTS.len() - 1])
                };
                let (rank, call) = (random.below(ranks), random.below(3));
                let step = random.within((made.min(steps - 1), steps - 1)) + 1;
                Self::Fault(format!("{kind}@rank={rank},step={step},call={call}"))
            }
        }
    }

    pub fn is_kill(&self) -> bool {
        matches!(self, Self::Signal { signal, .. } if *signal == libc::SIGKILL)
    }

    /// Returns a message if this exit status is a fault. `whole` states whether all steps are complete.
    pub fn check_exit(&self, status: ExitStatus, whole: bool) -> Option<String> {
        let ended = match (status.code(), self) {
            (Some(0), _) if whole => return None,
            (Some(0), _) => "it exited with 0 before its last step".to_owned(),
            (Some(101), _) => "it panicked".to_owned(),
            (_, Self::None) => "it was not disturbed".to_owned(),
            (None, Self::Fault(fault)) => {
                let deadly = ["kill", "abort", "segfault"];
                if deadly.iter().any(|kind| fault.starts_with(kind)) {
                    return None;
                }
                "no fault of this kind ends a process".to_owned()
            }
            (None, Self::Signal { signal, .. }) if status.signal() != Some(*signal) => {
                format!("signal {signal} was sent")
            }
            _ => return None,
        };
        Some(format!("{status}: {ended}"))
    }
}

impl fmt::Display for Disturbance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => write!(f, "undisturbed"),
            Self::Signal {
                signal,
                steps,
                then,
                ..
            } => {
                let name = match *signal {
                    libc::SIGKILL => "kill -9",
                    libc::SIGTERM => "SIGTERM",
                    _ => "SIGINT",
                };
                write!(f, "{name} {} ms after {steps} steps", then.as_millis())
            }
            Self::Fault(fault) => write!(f, "--inject {fault}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_judged_by_what_struck() {
        let exit = |code: i32| ExitStatus::from_raw(code << 8);
        let signal = ExitStatus::from_raw;
        let kill = Disturbance::Signal {
            signal: libc::SIGKILL,
            whom: 0,
            steps: 3,
            then: Duration::ZERO,
        };
        let fault = |text: &str| Disturbance::Fault(text.into());
        for (struck, status, whole, right) in [
            (&Disturbance::None, exit(0), true, true),
            (&Disturbance::None, exit(0), false, false),
            (&Disturbance::None, exit(1), true, false),
            (&kill, signal(libc::SIGKILL), false, true),
            (&kill, signal(libc::SIGSEGV), false, false),
            (&kill, exit(137), false, true),
            (&kill, exit(101), false, false),
            (
                &fault("segfault@rank=0"),
                signal(libc::SIGSEGV),
                false,
                true,
            ),
            (&fault("error@rank=0"), signal(libc::SIGSEGV), false, false),
            (&fault("error@rank=0"), exit(1), false, true),
            (&fault("delay:1s@rank=0"), exit(0), false, false),
        ] {
            let judged = struck.check_exit(status, whole);
            assert_eq!(judged.is_none(), right, "{struck}, {status}: {judged:?}");
        }
    }
}
