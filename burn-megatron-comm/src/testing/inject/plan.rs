//! Which faults strike one rank, and how far it is.

use std::fmt;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{Fault, FaultError, FaultKind};

/// The faults of one rank's communicators, which share it: it counts their calls and steps.
///
/// It may hold faults of other ranks, so that every rank can be given the same list. A fault strikes
/// once.
#[derive(Debug)]
pub struct Plan {
    faults: Vec<Fault>,
    deadline: Duration,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    next: Position,
    /// By the index of the fault.
    struck: Vec<bool>,
}

/// The place of a call among the calls of its rank.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Position {
    step: Option<u64>,
    /// Since the step began, or the start.
    in_step: u64,
    /// Since the start.
    total: u64,
}

impl Position {
    /// The place of the call `number` calls later.
    pub fn after(self, number: u64) -> Self {
        Self {
            in_step: self.in_step + number,
            total: self.total + number,
            ..self
        }
    }

    fn fits(self, fault: &Fault) -> bool {
        match fault.step {
            // It is asked for before there are calls.
            _ if fault.kind == FaultKind::NeverStarts => false,
            None => fault.call == self.total,
            step => step == self.step && fault.call == self.in_step,
        }
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.step {
            None => write!(f, "call {}", self.total),
            Some(step) => write!(
                f,
                "step {step}, call {} ({} since the start)",
                self.in_step, self.total
            ),
        }
    }
}

impl Plan {
    /// A plan of these faults, in which a dropped call waits for 30 s.
    pub fn new(faults: Vec<Fault>) -> Self {
        let struck = vec![false; faults.len()];
        Self {
            faults,
            deadline: Duration::from_secs(30),
            state: Mutex::new(State {
                struck,
                ..State::default()
            }),
        }
    }

    /// How long a call that was [dropped](FaultKind::Drop) is waited for before its wait fails.
    pub fn deadline(self, deadline: Duration) -> Self {
        Self { deadline, ..self }
    }

    /// Checks that every fault names a rank of a world of `size`.
    ///
    /// # Errors
    /// [`FaultError::Rank`] about the first that does not.
    pub fn check(&self, size: usize) -> Result<(), FaultError> {
        match self.faults.iter().find(|fault| fault.rank >= size) {
            None => Ok(()),
            Some(fault) => Err(FaultError::Rank {
                fault: *fault,
                size,
            }),
        }
    }

    /// Checks that every fault of a step names one of `steps`.
    ///
    /// # Errors
    /// [`FaultError::Step`] about the first that does not.
    pub fn check_steps(&self, steps: Range<u64>) -> Result<(), FaultError> {
        let strikes = |fault: &Fault| fault.step.is_none_or(|step| steps.contains(&step));
        match self.faults.iter().find(|fault| !strikes(fault)) {
            None => Ok(()),
            Some(fault) => Err(FaultError::Step {
                fault: *fault,
                steps,
            }),
        }
    }

    /// Whether a rank is not to start at all, which the program sees to.
    pub fn never_starts(&self, rank: usize) -> bool {
        let of_rank = |fault: &Fault| fault.rank == rank && fault.kind == FaultKind::NeverStarts;
        self.faults.iter().any(of_rank)
    }

    /// The faults of calls of `rank` that have not struck: it never came to their calls.
    pub fn left(&self, rank: usize) -> Vec<Fault> {
        let state = self.state();
        let faults = self.faults.iter().zip(&state.struck);
        let left = faults.filter(|(fault, struck)| {
            !**struck && fault.rank == rank && fault.kind != FaultKind::NeverStarts
        });
        left.map(|(fault, _)| *fault).collect()
    }

    pub(super) fn drop_deadline(&self) -> Duration {
        self.deadline
    }

    pub(super) fn begin_step(&self, step: u64) {
        let mut state = self.state();
        state.next.step = Some(step);
        state.next.in_step = 0;
    }

    /// Counts calls, and gives the place of the first of them.
    pub(super) fn count(&self, calls: u64) -> Position {
        let mut state = self.state();
        let first = state.next;
        state.next = first.after(calls);
        first
    }

    /// Whether a fault strikes `rank` at a call.
    pub(super) fn has(&self, rank: usize, position: Position) -> bool {
        let state = self.state();
        let mut faults = self.faults.iter().zip(&state.struck);
        faults.any(|(fault, struck)| !struck && fault.rank == rank && position.fits(fault))
    }

    /// The faults that strike `rank` at a call; they do so once.
    pub(super) fn strike(&self, rank: usize, position: Position) -> Vec<&Fault> {
        let mut state = self.state();
        let faults = self.faults.iter().zip(&mut state.struck);
        let due = faults.filter_map(|(fault, struck)| {
            let strikes = !*struck && fault.rank == rank && position.fits(fault);
            *struck |= strikes;
            strikes.then_some(fault)
        });
        due.collect()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No code that can panic runs under it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_that_does_not_come_is_refused() {
        let plan = Plan::new(vec!["error@rank=1,step=4,call=0".parse().unwrap()]);
        assert!(plan.check_steps(4..5).is_ok());
        for (steps, fits) in [
            (0..4, "steps 0 to 3"),
            (5..6, "step 5"),
            (7..7, "a run with steps left"),
        ] {
            let wanted = "error@rank=1,step=4,call=0 is about no step of this run; ";
            let error = plan.check_steps(steps).unwrap_err().to_string();
            assert_eq!(error, format!("{wanted}{fits} would fit"));
        }
    }
}
