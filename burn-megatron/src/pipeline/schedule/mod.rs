//! Pipeline schedules as data: for each rank the list of what it does, in order.
//!
//! A schedule is [`generate`]d or read from [CSV](Schedule::from_csv), [`validate`]d, and
//! [`simulate`]d with the times of its parts; a simulation is drawn as a table or a chart. Nothing
//! here computes anything: an engine runs the lists.
//!
//! # Rules of a valid schedule
//!
//! - Each (stage, micro-batch) goes forward once and backward once, on the rank that holds the
//!   stage: either [`Backward`](ActionKind::Backward), or
//!   [`InputGradient`](ActionKind::InputGradient) and later
//!   [`WeightGradient`](ActionKind::WeightGradient).
//! - What passes between two ranks is sent once and received once, after it was computed and before
//!   it is used. Neighbouring stages on one rank, as at the turn of a V, send nothing.
//! - The lists end even where a send waits until the other rank stands at the matching receive.
//!
//! # Where sends and receives stand
//!
//! A send directly follows the computation of what it sends. A receive stands as late as it can:
//! directly before its use, unless ranks would then wait for one another in a ring, as two
//! neighbours of 1F1B would that send to each other. See [`Schedule::with_communication`].
//!
//! An engine that overlaps sends and receives with computation starts a send when its tensor is
//! computed, and waits for what it receives only before the use; [`simulate`] does that. An engine
//! that waits in every send and receive, in the order of the list, ends as well.

mod action;
mod chart;
mod communicate;
mod config;
mod csv;
mod error;
mod generate;
mod ring;
mod simulate;
mod table;
mod validate;

pub use action::{Action, ActionKind, NoAction};
pub use config::{ScheduleConfig, ScheduleKind};
pub use error::{CsvFault, ScheduleError};
pub use generate::{generate, warm_up};
pub(super) use simulate::idle_part;
pub use simulate::{Simulation, Span, Times, simulate};
pub use validate::{Invalid, Reason, Report, validate};

/// What every rank of a pipeline does, in order.
///
/// A plain value that may be wrong; [`validate`] tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    name: String,
    micro_batches: usize,
    /// The rank of each stage.
    placement: Vec<usize>,
    ranks: Vec<Vec<Action>>,
}

impl Schedule {
    /// A schedule of these lists, one for each rank; `placement` gives the rank of each stage.
    ///
    /// # Errors
    ///
    /// [`ScheduleError::Nothing`] without ranks, stages or micro-batches,
    /// [`ScheduleError::Placement`] where a stage lies on a rank that has no list.
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
                return Err(ScheduleError::Nothing { what });
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

    /// The name, as in `1f1b`; of a schedule from a file, whatever the reader called it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        self.ranks.len()
    }

    /// The number of stages, over all ranks.
    pub fn stages(&self) -> usize {
        self.placement.len()
    }

    /// The number of micro-batches.
    pub fn micro_batches(&self) -> usize {
        self.micro_batches
    }

    /// What a rank does, in order.
    ///
    /// # Panics
    ///
    /// Where the rank is not below [`ranks`](Self::ranks).
    #[track_caller]
    pub fn actions(&self, rank: usize) -> &[Action] {
        assert!(
            rank < self.ranks(),
            "rank {rank} is not one of {}",
            self.ranks()
        );
        &self.ranks[rank]
    }

    /// The rank that holds a stage.
    ///
    /// # Panics
    ///
    /// Where the stage is not below [`stages`](Self::stages).
    #[track_caller]
    pub fn rank_of(&self, stage: usize) -> usize {
        assert!(
            stage < self.stages(),
            "stage {stage} is not one of {}",
            self.stages()
        );
        self.placement[stage]
    }

    /// The stages that a rank holds, ascending; none for a rank that is not there.
    pub fn stages_of(&self, rank: usize) -> Vec<usize> {
        (0..self.stages())
            .filter(|stage| self.placement[*stage] == rank)
            .collect()
    }

    /// The rank at the other end of a send or a receive.
    ///
    /// `None` for a computation, and where the stages are not there or on the same rank.
    pub fn peer(&self, action: &Action) -> Option<usize> {
        let own = *self.placement.get(action.stage)?;
        let other = *self.placement.get(action.counterpart()?.stage)?;
        (other != own).then_some(other)
    }

    /// The rank and the action at the other end of a send or a receive.
    fn other_end(&self, action: &Action) -> Option<(usize, Action)> {
        Some((self.peer(action)?, action.counterpart()?))
    }

    /// The receive that a computation needs before it.
    fn needs(&self, action: &Action) -> Option<Action> {
        let kind = match action.kind {
            ActionKind::Forward => ActionKind::ReceiveActivation,
            kind if kind.gives_input_gradient() => ActionKind::ReceiveGradient,
            _ => return None,
        };
        self.transfer(kind, action)
    }

    /// The send that a computation calls for after it.
    fn gives(&self, action: &Action) -> Option<Action> {
        let kind = match action.kind {
            ActionKind::Forward => ActionKind::SendActivation,
            kind if kind.gives_input_gradient() => ActionKind::SendGradient,
            _ => return None,
        };
        self.transfer(kind, action)
    }

    /// The send or receive of this kind for a stage, if its tensor passes between ranks.
    fn transfer(&self, kind: ActionKind, of: &Action) -> Option<Action> {
        let action = Action::new(kind, of.stage, of.micro_batch);
        self.peer(&action).map(|_| action)
    }
}

#[cfg(test)]
mod tests;
