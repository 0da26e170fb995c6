//! Determines why a world ended, and whether its job may be restarted.

use std::fmt;

use burn_megatron::comm::{FailureKind, WorldError};
use burn_megatron_train::Verdict as StepVerdict;

use crate::launch::exit_status::RankExitStatus;
use crate::launch::supervise::JobFailure;
use crate::launch::world::RunResult;

/// Reason why a world ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Every rank succeeded.
    Complete,
    /// The launcher or a rank received SIGINT, SIGTERM or SIGHUP.
    Interrupted,
    /// A process was ended by a signal.
    Signal,
    /// A rank does not respond: a heartbeat is missing, a deadline has passed, or a connection was lost.
    Lost,
    /// A rank panicked.
    Panic,
    /// Wrong usage, or a program that cannot be started.
    Usage,
    /// A check of a step found a wrong result.
    Step(StepVerdict),
    /// A rank ended with an error that would occur again: invalid settings or files, a run that diverged, or
    /// different calls on two ranks.
    Error,
}

impl Verdict {
    /// Returns the verdict on a world.
    pub fn of(end: &RunResult) -> Self {
        if end.interrupted.is_some() {
            return Self::Interrupted;
        }
        match &end.failure {
            None => Self::Complete,
            Some(JobFailure::Rank { status, .. }) => Self::of_rank(status, end.kind),
            // mpirun rejected its arguments.
            Some(JobFailure::Starter(RankExitStatus::Code(_))) if !end.has_started => Self::Usage,
            Some(JobFailure::Starter(RankExitStatus::Signal(_))) => Self::Signal,
            Some(JobFailure::Guard(RankExitStatus::Signal(_))) => Self::Signal,
            Some(JobFailure::Starter(_) | JobFailure::Guard(_) | JobFailure::NotStarted(_)) => {
                Self::Lost
            }
        }
    }

    /// Returns the verdict on the rank that failed first. `kind` is the kind of failure that the rendezvous recorded.
    fn of_rank(status: &RankExitStatus, kind: Option<FailureKind>) -> Self {
        let code = match status {
            RankExitStatus::Signal(libc::SIGINT) => return Self::Interrupted,
            RankExitStatus::Signal(_) => return Self::Signal,
            RankExitStatus::Lost(_) => return Self::Lost,
            RankExitStatus::NotStarted(_) => return Self::Usage,
            RankExitStatus::Code(code) => *code,
        };
        let step = u8::try_from(code)
            .ok()
            .and_then(StepVerdict::from_exit_code);
        if let Some(step) = step {
            return Self::Step(step);
        }
        // A shell reports a command that was ended by a signal with 128 + the signal.
        let signal = code - 128;
        match u8::try_from(code).unwrap_or(u8::MAX) {
            WorldError::EXIT_PANIC => Self::Panic,
            // This rank lost another rank, which has no exit code.
            WorldError::EXIT_PEER_FAILED | WorldError::EXIT_NO_RENDEZVOUS => Self::Lost,
            WorldError::EXIT_OWN_ERROR if kind.is_some_and(is_lost) => Self::Lost,
            2 | 126 | 127 => Self::Usage,
            _ if [libc::SIGINT, libc::SIGTERM, libc::SIGHUP].contains(&signal) => Self::Interrupted,
            _ if (1..=64).contains(&signal) => Self::Signal,
            _ => Self::Error,
        }
    }

    /// Returns whether the failure may be transient, so that the job is restarted.
    pub fn may_pass(self) -> bool {
        match self {
            Self::Signal | Self::Lost | Self::Panic => true,
            Self::Step(step) => step.may_pass_after_restart(),
            Self::Complete | Self::Interrupted | Self::Usage | Self::Error => false,
        }
    }

    /// Returns a short name for the record.
    pub fn name(self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::Interrupted => "interrupted",
            Self::Signal => "signal",
            Self::Lost => "lost",
            Self::Panic => "panic",
            Self::Usage => "usage",
            Self::Step(StepVerdict::Transient) => "transient",
            Self::Step(StepVerdict::StateChanged) => "state_changed",
            Self::Step(StepVerdict::Device) => "device",
            Self::Step(StepVerdict::NotDeterministic) => "not_deterministic",
            Self::Step(StepVerdict::DataOrSoftware) => "data_or_software",
            Self::Error => "error",
        }
    }
}

/// Returns whether the failure means that another rank or the connection to it was lost.
fn is_lost(kind: FailureKind) -> bool {
    match kind {
        FailureKind::ProcessExited
        | FailureKind::NoHeartbeat
        | FailureKind::Timeout
        | FailureKind::Transport => true,
        FailureKind::OwnError | FailureKind::Mismatch => false,
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Complete => "complete",
            Self::Interrupted => "interrupted",
            Self::Signal => "a process was ended by a signal, which may be transient",
            Self::Lost => "a rank was lost, which may be transient",
            Self::Panic => "a rank panicked, which is a defect if it happens again",
            Self::Usage => "wrong usage, which would fail again",
            Self::Step(StepVerdict::Device) => {
                return write!(
                    f,
                    "a fault of a device: restart the job without this device"
                );
            }
            Self::Step(step) => return write!(f, "a check of a step found: {step}"),
            Self::Error => "an error of a rank, which would occur again",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(failure: Option<JobFailure>, kind: Option<FailureKind>) -> RunResult {
        RunResult {
            failure,
            kind,
            has_started: true,
            ..RunResult::default()
        }
    }

    fn rank(status: RankExitStatus) -> Option<JobFailure> {
        Some(JobFailure::Rank {
            rank: 1,
            status,
            after: None,
        })
    }

    #[test]
    fn every_way_to_end_has_its_verdict() {
        use RankExitStatus::{Code, Lost, NotStarted, Signal};
        let own = Some(FailureKind::OwnError);
        for (status, kind, verdict) in [
            (Signal(9), Some(FailureKind::ProcessExited), Verdict::Signal),
            (Signal(11), None, Verdict::Signal),
            (Signal(15), None, Verdict::Signal),
            (Signal(2), None, Verdict::Interrupted),
            (Lost("gone".into()), None, Verdict::Lost),
            (NotStarted("gone".into()), None, Verdict::Usage),
            (Code(1), own, Verdict::Error),
            (Code(1), Some(FailureKind::Mismatch), Verdict::Error),
            (Code(1), Some(FailureKind::Timeout), Verdict::Lost),
            (Code(1), Some(FailureKind::Transport), Verdict::Lost),
            // The run diverged after all ranks had returned.
            (Code(1), None, Verdict::Error),
            (Code(2), own, Verdict::Usage),
            (Code(3), Some(FailureKind::NoHeartbeat), Verdict::Lost),
            (Code(4), own, Verdict::Lost),
            (Code(5), own, Verdict::Step(StepVerdict::Transient)),
            (Code(7), own, Verdict::Step(StepVerdict::Device)),
            (Code(50), Some(FailureKind::ProcessExited), Verdict::Error),
            (Code(101), own, Verdict::Panic),
            (Code(127), None, Verdict::Usage),
            (Code(130), None, Verdict::Interrupted),
            (Code(143), None, Verdict::Interrupted),
            (Code(137), None, Verdict::Signal),
            (Code(255), None, Verdict::Error),
        ] {
            let found = Verdict::of(&end(rank(status.clone()), kind));
            assert_eq!(found, verdict, "{status:?}, {kind:?}");
        }
        assert_eq!(Verdict::of(&end(None, None)), Verdict::Complete);
        let interrupted = RunResult {
            interrupted: Some(2),
            ..end(rank(Signal(9)), None)
        };
        assert_eq!(Verdict::of(&interrupted), Verdict::Interrupted);
        let mpirun = end(Some(JobFailure::Starter(Code(1))), None);
        assert_eq!(Verdict::of(&mpirun), Verdict::Lost);
        let killed = end(Some(JobFailure::Starter(Signal(9))), None);
        assert_eq!(Verdict::of(&killed), Verdict::Signal);
        let refused = RunResult {
            has_started: false,
            ..mpirun
        };
        assert_eq!(Verdict::of(&refused), Verdict::Usage);
        let late = end(Some(JobFailure::NotStarted(vec![2])), None);
        assert_eq!(Verdict::of(&late), Verdict::Lost);
    }

    #[test]
    fn what_a_check_of_a_step_found_may_pass_or_not() {
        let may_pass = StepVerdict::ALL.map(|step| Verdict::Step(step).may_pass());
        assert_eq!(may_pass, [true, true, false, false, false]);
        assert!(Verdict::Lost.may_pass() && !Verdict::Error.may_pass());
    }
}
