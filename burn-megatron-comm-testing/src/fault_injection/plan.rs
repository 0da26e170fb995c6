//! The faults of one rank, and the counters of its calls.

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use parking_lot::Mutex;

use super::{BitFlip, Fault, FaultError, FaultKind, FlipTarget};

/// The faults to inject on one rank. The communicators of the rank share the plan, which counts their calls and steps.
///
/// The plan may contain faults of other ranks, so all ranks can be given the same list. Each fault triggers only once.
#[derive(Debug)]
pub struct FaultPlan {
    faults: Vec<Fault>,
    deadline: Duration,
    state: Mutex<PlanState>,
}

#[derive(Debug, Default)]
struct PlanState {
    next: CallPosition,
    /// The positions of the next activation and of the next gradient.
    tensors: [CallPosition; 2],
    /// Whether each fault has triggered. The index is the index in `faults`.
    triggered: Vec<bool>,
}

/// The position of a call among the calls of its rank.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CallPosition {
    step: Option<u64>,
    /// The number of calls since the start of the step, or since the start of the run if no step has begun.
    in_step: u64,
    /// The number of calls since the start of the run.
    total: u64,
}

impl CallPosition {
    /// Returns the position `number` calls later.
    pub fn after(self, number: u64) -> Self {
        Self {
            in_step: self.in_step + number,
            total: self.total + number,
            ..self
        }
    }

    /// Returns whether the fault triggers at the call at this position.
    fn fits(self, fault: &Fault) -> bool {
        !fault.is_elsewhere() && self.is_at(fault)
    }

    fn is_at(self, fault: &Fault) -> bool {
        match fault.step {
            None => fault.call == self.total,
            step => step == self.step && fault.call == self.in_step,
        }
    }
}

impl fmt::Display for CallPosition {
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

impl FaultPlan {
    /// Creates a plan for calls with a timeout of 30 s.
    pub fn new(faults: Vec<Fault>) -> Self {
        let triggered = vec![false; faults.len()];
        Self {
            faults,
            deadline: Duration::from_secs(30),
            state: Mutex::new(PlanState {
                triggered,
                ..PlanState::default()
            }),
        }
    }

    /// Sets the timeout of the calls. The wait of a [dropped](FaultKind::Drop) call fails after 1.5 times this timeout,
    /// so that the ranks that wait for the dropped call fail first.
    pub fn deadline(self, deadline: Duration) -> Self {
        Self { deadline, ..self }
    }

    /// Checks that the rank of every fault exists in a world of `size` ranks.
    ///
    /// # Errors
    /// [`FaultError::Rank`] for the first fault whose rank does not exist.
    pub fn check(&self, size: usize) -> Result<(), FaultError> {
        match self.faults.iter().find(|fault| fault.rank >= size) {
            None => Ok(()),
            Some(fault) => Err(FaultError::Rank {
                fault: *fault,
                size,
            }),
        }
    }

    /// Checks that the step of every fault is in the range `steps`. Faults without a step are valid.
    ///
    /// # Errors
    /// [`FaultError::Step`] for the first fault whose step is not in `steps`.
    pub fn check_steps(&self, steps: Range<u64>) -> Result<(), FaultError> {
        let triggers = |fault: &Fault| fault.step.is_none_or(|step| steps.contains(&step));
        match self.faults.iter().find(|fault| !triggers(fault)) {
            None => Ok(()),
            Some(fault) => Err(FaultError::Step {
                fault: *fault,
                steps,
            }),
        }
    }

    /// Returns whether a fault prevents `rank` from starting. The program that starts the ranks must check this.
    pub fn never_starts(&self, rank: usize) -> bool {
        let of_rank = |fault: &Fault| fault.rank == rank && fault.kind == FaultKind::NeverStarts;
        self.faults.iter().any(of_rank)
    }

    /// Returns the faults of `rank` that have not triggered, because the rank did not issue the selected calls.
    pub fn not_triggered(&self, rank: usize) -> Vec<Fault> {
        let state = self.state.lock();
        let faults = self.faults.iter().zip(&state.triggered);
        let left = faults.filter(|(fault, triggered)| {
            !**triggered && fault.rank == rank && fault.kind != FaultKind::NeverStarts
        });
        left.map(|(fault, _)| *fault).collect()
    }

    /// Returns the time after which the wait of a dropped call fails.
    pub(super) fn drop_wait(&self) -> Duration {
        self.deadline + self.deadline / 2
    }

    pub(super) fn begin_step(&self, step: u64) {
        let mut state = self.state.lock();
        state.next.step = Some(step);
        state.next.in_step = 0;
        state.tensors = state.tensors.map(|next| CallPosition {
            step: Some(step),
            in_step: 0,
            ..next
        });
    }

    /// Counts `calls` calls and returns the position of the first of these calls.
    pub(super) fn count(&self, calls: u64) -> CallPosition {
        let mut state = self.state.lock();
        let first = state.next;
        state.next = first.after(calls);
        first
    }

    /// Returns whether a fault triggers at the call of `rank` at this position.
    pub(super) fn has(&self, rank: usize, position: CallPosition) -> bool {
        let state = self.state.lock();
        let mut faults = self.faults.iter().zip(&state.triggered);
        faults.any(|(fault, triggered)| !triggered && fault.rank == rank && position.fits(fault))
    }

    /// Counts an activation or a gradient of `rank`. Returns the bit to flip in this tensor, or `None`.
    pub fn next_tensor(&self, rank: usize, target: FlipTarget) -> Option<BitFlip> {
        let mut state = self.state.lock();
        let PlanState {
            tensors, triggered, ..
        } = &mut *state;
        let next = &mut tensors[usize::from(target == FlipTarget::Gradient)];
        let position = *next;
        *next = position.after(1);
        let due = |fault: &Fault| {
            fault
                .flip_of(rank, target)
                .filter(|_| position.is_at(fault))
        };
        self.trigger(triggered, due).next()
    }

    /// Calls `due` for each fault that has not triggered. Returns the values that `due` returns, and marks these faults
    /// as triggered.
    fn trigger<'a, T>(
        &'a self,
        triggered: &mut [bool],
        due: impl Fn(&'a Fault) -> Option<T>,
    ) -> impl Iterator<Item = T> {
        let waiting = self.faults.iter().zip(triggered);
        let waiting = waiting.filter(|(_, triggered)| !**triggered);
        waiting.filter_map(move |(fault, triggered)| {
            let value = due(fault)?;
            *triggered = true;
            Some(value)
        })
    }

    /// Returns the number of activations, gradients or communicator calls since the start of the run, depending on
    /// `target`.
    pub fn counted(&self, target: FlipTarget) -> u64 {
        let state = self.state.lock();
        match target {
            FlipTarget::Activation => state.tensors[0].total,
            FlipTarget::Gradient => state.tensors[1].total,
            _ => state.next.total,
        }
    }

    /// Returns the bits to flip in the state of `rank` at the start of a step. Each bit is returned with the index of
    /// its tensor. `tensors` is the number of tensors of the kind `target`. Faults without a step trigger at the first
    /// step.
    pub fn of_state(&self, rank: usize, target: FlipTarget, tensors: u64) -> Vec<(u64, BitFlip)> {
        let mut state = self.state.lock();
        let step = state.next.step;
        let due = |fault: &Fault| {
            let flip = fault.flip_of(rank, target)?;
            let is_now = fault.step.is_none() || fault.step == step;
            (is_now && fault.call < tensors).then_some((fault.call, flip))
        };
        self.trigger(&mut state.triggered, due).collect()
    }

    /// Returns the faults that trigger at the call of `rank` at this position, and marks them as triggered.
    pub(super) fn take_due(&self, rank: usize, position: CallPosition) -> Vec<&Fault> {
        let mut state = self.state.lock();
        let due = self.trigger(&mut state.triggered, |fault| {
            (fault.rank == rank && position.fits(fault)).then_some(fault)
        });
        due.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_that_does_not_come_is_refused() {
        let plan = FaultPlan::new(vec!["error@rank=1,step=4,call=0".parse().unwrap()]);
        assert!(plan.check_steps(4..5).is_ok());
        for (steps, fits) in [
            (0..4, "steps 0 to 3"),
            (5..6, "step 5"),
            (7..7, "a run with steps left"),
        ] {
            let wanted =
                "invalid fault error@rank=1,step=4,call=0: step 4 is not in this run; expected ";
            let error = plan.check_steps(steps).unwrap_err().to_string();
            assert_eq!(error, format!("{wanted}{fits}"));
        }
    }
}
