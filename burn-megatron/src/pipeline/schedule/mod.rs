//! Pipeline schedules. A schedule is a list of actions in order, for each rank.
//!
//! [`generate`] creates a schedule, and [`Schedule::from_csv`] reads a schedule from CSV. [`validate`] checks it, and
//! [`simulate`] computes its timeline from given times. A simulation can be drawn as a table or a chart. This module
//! does not run a model: the [engine](super::engine) runs the lists of actions.
//!
//! # Rules of a valid schedule
//!
//! - Each stage runs one forward and one backward for each micro-batch, on the rank that holds the stage. The backward
//!   is either [`Backward`](ActionKind::Backward), or [`InputGradient`](ActionKind::InputGradient) and later
//!   [`WeightGradient`](ActionKind::WeightGradient).
//! - A forward may be [paired](ActionKind::PairedForward) with the backward of another micro-batch.
//! - Every tensor that one rank computes and another rank uses is sent once and received once. It is sent after it is
//!   computed, and received before it is used. Two adjacent stages on the same rank, as at the turning point of a
//!   V-shaped schedule, do not send tensors to each other.
//! - The gradients of each stage are reduced once ([`ReduceGradients`](ActionKind::ReduceGradients)), by the
//!   rank that holds the stage, at any position after the stage's last forward.
//! - The schedule does not deadlock, even if each send blocks until the matching receive starts.
//!
//! # Positions of sends and receives
//!
//! A send directly follows the computation of its tensor. If reductions follow this computation, the send follows the
//! reductions. A receive is as late as possible: directly before the tensor is used, unless ranks would then wait for
//! each other in a cycle. For example, two adjacent ranks of 1F1B that send to each other would form a cycle. See
//! [`Schedule::with_communication`].
//!
//! # Positions of reductions
//!
//! A [`ReduceGradients`](ActionKind::ReduceGradients) action does not wait for the backwards of the stage. Gradients
//! that are already complete are reduced immediately. Every other gradient is reduced as soon as it is complete,
//! including deferred weight gradients. The earliest valid position is after the last forward of the stage, because a
//! further forward could use any parameter again. At this position, the reductions overlap with the last backward.
//!
//! The positions determine the times at which the reductions start, but do not change their results. Generators choose
//! the earliest position, except for interleaved schedules. In an interleaved schedule, rank r finishes the last
//! backward of a stage r backwards earlier than rank 0. Therefore rank r starts its reductions r backwards after the
//! earliest position, so that all ranks start at the same time.
//!
//! # Engines
//!
//! An engine that overlaps communication with computation starts a send when the tensor is computed, and waits for a
//! receive directly before the tensor is used. [`simulate`] assumes such an engine. An engine that blocks in every send
//! and receive, in the order of the list, does not deadlock either.

mod action;
mod communicate;
mod config;
mod csv;
mod error;
mod generate;
mod reduce_gradients;
mod simulate;
mod table;
mod validate;
mod wait_cycle;

pub use action::{Action, ActionKind, ParseActionError};
pub use config::{ScheduleConfig, ScheduleKind};
pub use error::{CsvFault, ScheduleError};
pub use generate::{generate, warm_up};
pub(super) use simulate::idle_fraction;
pub use simulate::{ActionSpan, Simulation, StageTimes, simulate, total_time};
pub use validate::{ActivationReport, InvalidSchedule, RuleViolation, validate};

/// The actions of every rank of a pipeline, in order.
///
/// A schedule is not necessarily valid. Use [`validate`] to check it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    name: String,
    micro_batches: usize,
    /// The rank of each stage.
    placement: Vec<usize>,
    ranks: Vec<Vec<Action>>,
}

impl Schedule {
    /// Creates a schedule from one list of actions per rank. `placement[s]` is the rank of stage `s`.
    ///
    /// # Errors
    ///
    /// [`ScheduleError::Zero`] if there are no ranks, stages or micro-batches; [`ScheduleError::Placement`] if a stage
    /// is placed on a rank that has no list.
    pub fn new(
        name: impl Into<String>,
        placement: Vec<usize>,
        micro_batches: usize,
        ranks: Vec<Vec<Action>>,
    ) -> Result<Self, ScheduleError> {
        let counts = [
            ("ranks", ranks.len()),
            ("stages", placement.len()),
            ("micro-batches", micro_batches),
        ];
        for (what, count) in counts {
            if count == 0 {
                return Err(ScheduleError::Zero { what });
            }
        }
        let outside = |(_, rank): &(usize, &usize)| **rank >= ranks.len();
        if let Some((stage, rank)) = placement.iter().enumerate().find(outside) {
            return Err(ScheduleError::Placement {
                stage,
                rank: *rank,
                ranks: ranks.len(),
            });
        }
        Ok(Schedule {
            name: name.into(),
            micro_batches,
            placement,
            ranks,
        })
    }

    /// Returns the name of the schedule, such as `1f1b`. The name of a schedule from a file is given by the caller.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the number of pipeline ranks.
    pub fn ranks(&self) -> usize {
        self.ranks.len()
    }

    /// Returns the total number of stages on all ranks.
    pub fn stages(&self) -> usize {
        self.placement.len()
    }

    /// Returns the number of micro-batches per step.
    pub fn micro_batches(&self) -> usize {
        self.micro_batches
    }

    /// Returns the actions of a rank, in order.
    ///
    /// # Panics
    ///
    /// Panics if the rank is not below [`ranks`](Self::ranks).
    #[track_caller]
    pub fn actions(&self, rank: usize) -> &[Action] {
        assert!(
            rank < self.ranks(),
            "rank {rank} is out of range for {} ranks",
            self.ranks()
        );
        &self.ranks[rank]
    }

    /// Returns the rank that holds a stage.
    ///
    /// # Panics
    ///
    /// Panics if the stage is not below [`stages`](Self::stages).
    #[track_caller]
    pub fn rank_of(&self, stage: usize) -> usize {
        assert!(
            stage < self.stages(),
            "stage {stage} is out of range for {} stages",
            self.stages()
        );
        self.placement[stage]
    }

    /// Returns the stages of a rank in ascending order, or an empty list for a rank out of range.
    pub fn stages_of(&self, rank: usize) -> Vec<usize> {
        (0..self.stages())
            .filter(|stage| self.placement[*stage] == rank)
            .collect()
    }

    /// Returns the peer rank of a send or a receive.
    ///
    /// Returns `None` for any other action, and if the stages are out of range or on the same rank.
    pub fn peer(&self, action: &Action) -> Option<usize> {
        let own = *self.placement.get(action.stage)?;
        let other = *self.placement.get(action.counterpart()?.stage)?;
        (other != own).then_some(other)
    }

    /// Returns the peer rank of a send or a receive, and the matching action on that rank.
    fn matching_transfer(&self, action: &Action) -> Option<(usize, Action)> {
        Some((self.peer(action)?, action.counterpart()?))
    }

    /// Whether the schedule contains a [pair](ActionKind::PairedForward) of a forward and a backward.
    pub fn has_pairs(&self) -> bool {
        let mut actions = self.ranks.iter().flatten();
        actions.any(|action| action.kind == ActionKind::PairedForward)
    }

    /// Returns the computations that run together at this index of a rank's list: one computation, or the two
    /// of a pair.
    pub(super) fn together(&self, rank: usize, index: usize) -> &[Action] {
        let list = &self.ranks[rank];
        let Some(action) = list.get(index) else {
            return &[];
        };
        let count = 1 + usize::from(action.kind == ActionKind::PairedForward);
        &list[index..list.len().min(index + count)]
    }

    /// Returns the receive that a computation depends on, if any.
    pub(super) fn receive_before(&self, action: &Action) -> Option<Action> {
        let kind = match action.kind {
            kind if kind.is_forward() => ActionKind::ReceiveActivation,
            kind if kind.computes_input_gradient() => ActionKind::ReceiveGradient,
            _ => return None,
        };
        self.transfer(kind, action)
    }

    /// Returns the send of the result of a computation, if any.
    fn send_after(&self, action: &Action) -> Option<Action> {
        let kind = match action.kind {
            kind if kind.is_forward() => ActionKind::SendActivation,
            kind if kind.computes_input_gradient() => ActionKind::SendGradient,
            _ => return None,
        };
        self.transfer(kind, action)
    }

    /// Returns the send or receive of this kind for a stage, if its tensor crosses ranks.
    fn transfer(&self, kind: ActionKind, of: &Action) -> Option<Action> {
        let action = Action::new(kind, of.stage, of.micro_batch);
        self.peer(&action).map(|_| action)
    }
}

#[cfg(test)]
mod tests;
