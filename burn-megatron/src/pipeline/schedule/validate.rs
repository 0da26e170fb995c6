//! Checks the rules of valid schedules and finds the first action that violates a rule.

use std::collections::HashMap;
use std::fmt;

use super::wait_cycle::wait_cycle;
use super::{Action, ActionKind, Schedule};

/// The peak numbers of stage activations that a valid schedule holds in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ActivationReport {
    /// The peak number of stage activations in memory, for each rank. A stage activation is the data of one micro-batch
    /// that one stage keeps from its forward until its backward. If the weight gradient is a separate action, the data
    /// is kept until the weight gradient.
    pub peak_activations: Vec<usize>,
    /// The peak number of stage activations in memory, for each rank, if a stage activation is only kept until its
    /// input gradient. This is a good estimate if a weight gradient needs little of the data that the forward kept.
    pub peak_until_input_gradient: Vec<usize>,
}

/// The error for an invalid schedule: the first action that violates a rule, and the rule.
///
/// Violations are ordered by their position in the list of the rank, then by rank. Deadlocks are only checked if the
/// list of each rank is valid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct InvalidSchedule {
    /// The rank whose list contains the action.
    pub rank: usize,
    /// The index of the action in the list of the rank, or the length of the list if an action is missing.
    pub position: usize,
    /// The number of actions in the list of the rank.
    pub actions: usize,
    /// The invalid or missing action.
    pub action: Action,
    /// The violated rule.
    pub reason: RuleViolation,
}

impl fmt::Display for InvalidSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let InvalidSchedule {
            rank,
            position,
            actions,
            action,
            reason,
        } = self;
        let description = action.describe();
        if *reason == RuleViolation::Missing {
            return write!(
                f,
                "rank {rank} ends after {actions} actions without \"{action}\" ({description})"
            );
        }
        let nth = position + 1;
        write!(
            f,
            "rank {rank}, action {nth} of {actions}, \"{action}\" ({description}): {reason}"
        )
    }
}

/// The rule that an action violates.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RuleViolation {
    /// The stage or the micro-batch is out of range.
    #[error(
        "out of range for {stages} stages and {micro_batches} micro-batches, both counted from 0"
    )]
    Outside {
        /// The number of stages of the schedule.
        stages: usize,
        /// The number of micro-batches of the schedule.
        micro_batches: usize,
    },
    /// The stage of the action is on another rank.
    #[error("the stage is on rank {owner}")]
    WrongRank {
        /// The rank that holds the stage.
        owner: usize,
    },
    /// The action sends or receives a tensor between two stages of the same rank.
    #[error("both stages are on this rank, or one does not exist: nothing to send or receive")]
    NoTransfer,
    /// A reduction of gradients has a micro-batch.
    #[error("a reduction has no micro-batch: expected micro_batch 0, got {given}")]
    MicroBatchOfReduction {
        /// The micro-batch of the reduction.
        given: usize,
    },
    /// The forward of a pair is not directly followed by the backward of the pair.
    #[error(
        "expected a backward of another micro-batch directly after it, as in \"FB 2 5 2 3\": their parts run in turns"
    )]
    Pair,
    /// An earlier action has already done the same computation or transfer.
    #[error("already done by \"{action}\", action {} of the rank", position + 1)]
    Repeated {
        /// The earlier action.
        action: Action,
        /// The index of the earlier action in the list.
        position: usize,
    },
    /// An action that must precede this action is later in the list, or missing.
    #[error("it needs \"{needs}\" ({}) before it", needs.describe())]
    TooEarly {
        /// The action on the same rank that must precede this action.
        needs: Action,
    },
    /// An action is missing.
    #[error("missing from the list of the rank")]
    Missing,
    /// Ranks wait for each other in a cycle.
    #[error("{}", cycle_text(cycle))]
    Deadlock {
        /// The ranks of the cycle, each with the action in which it waits for the next rank. The last rank waits for
        /// the first rank.
        cycle: Vec<(usize, Action)>,
    },
}

/// Formats a cycle: `rank 0 waits in "SF 0 1" for rank 1, which waits in "SB 1 0" for rank 0`.
fn cycle_text(cycle: &[(usize, Action)]) -> String {
    let waits: Vec<_> = (0..cycle.len())
        .map(|i| {
            let (action, next) = (cycle[i].1, cycle[(i + 1) % cycle.len()].0);
            format!("waits in \"{action}\" for rank {next}")
        })
        .collect();
    let first = cycle.first().map_or(0, |(rank, _)| *rank);
    format!("rank {first} {}", waits.join(", which "))
}

/// Checks that a schedule satisfies all [rules](super), and counts the stage activations in memory.
///
/// # Errors
///
/// [`InvalidSchedule`] with the first invalid action.
pub fn validate(schedule: &Schedule) -> Result<ActivationReport, InvalidSchedule> {
    let required = Required {
        transfers: true,
        reductions: true,
    };
    check_schedule(schedule, required).map(|()| activation_report(schedule))
}

/// The actions that a list must contain in addition to its computations.
#[derive(Clone, Copy)]
pub(super) struct Required {
    /// Whether the list must contain all sends and receives. If false, the list must not contain any.
    pub transfers: bool,
    /// Whether the list must contain one reduction of gradients per stage.
    pub reductions: bool,
}

/// Checks the lists of all ranks, first individually and then together.
pub(super) fn check_schedule(
    schedule: &Schedule,
    required: Required,
) -> Result<(), InvalidSchedule> {
    let first_invalid = (0..schedule.ranks())
        .filter_map(|rank| check_rank(schedule, rank, required).err())
        .min_by_key(|invalid| (invalid.position, invalid.rank));
    match first_invalid {
        Some(invalid) => Err(invalid),
        None => check_deadlock(schedule),
    }
}

/// Returns the operations of an action, each as an action that does nothing else. An operation is done once per
/// stage and micro-batch, a reduction once per stage.
fn operations(action: &Action) -> Vec<Action> {
    let of = |kind| Action { kind, ..*action };
    match action.kind {
        ActionKind::PairedForward => vec![of(ActionKind::Forward)],
        ActionKind::Backward => vec![
            of(ActionKind::InputGradient),
            of(ActionKind::WeightGradient),
        ],
        _ => vec![*action],
    }
}

/// Checks the list of one rank.
///
/// With transfers, all dependencies of a rank are in its own list. Lists that are individually valid can then
/// only fail by a deadlock.
pub(super) fn check_rank(
    schedule: &Schedule,
    rank: usize,
    required: Required,
) -> Result<(), InvalidSchedule> {
    let list = &schedule.ranks[rank];
    let mut checker = Checker {
        schedule,
        required,
        done: HashMap::new(),
    };
    let invalid = |position, action, reason| InvalidSchedule {
        rank,
        position,
        actions: list.len(),
        action,
        reason,
    };
    for (position, action) in list.iter().enumerate() {
        if !is_paired(action, list.get(position + 1)) {
            return Err(invalid(position, *action, RuleViolation::Pair));
        }
        checker
            .step(rank, position, action)
            .map_err(|reason| invalid(position, *action, reason))?;
    }
    match checker.missing(rank) {
        Some(action) => Err(invalid(list.len(), action, RuleViolation::Missing)),
        None => Ok(()),
    }
}

/// Whether the forward of a pair is followed by a backward that does not depend on it.
fn is_paired(action: &Action, next: Option<&Action>) -> bool {
    let follows =
        |next: &Action| next.kind == ActionKind::Backward && next.micro_batch != action.micro_batch;
    action.kind != ActionKind::PairedForward || next.is_some_and(follows)
}

struct Checker<'a> {
    schedule: &'a Schedule,
    required: Required,
    /// The action that did each operation, and its position.
    done: HashMap<Action, (Action, usize)>,
}

impl Checker<'_> {
    fn step(&mut self, rank: usize, position: usize, action: &Action) -> Result<(), RuleViolation> {
        let (stages, micro_batches) = (self.schedule.stages(), self.schedule.micro_batches());
        if action.stage >= stages || action.micro_batch >= micro_batches {
            return Err(RuleViolation::Outside {
                stages,
                micro_batches,
            });
        }
        let owner = self.schedule.rank_of(action.stage);
        if owner != rank {
            return Err(RuleViolation::WrongRank { owner });
        }
        if action.kind.is_transfer() && self.schedule.peer(action).is_none() {
            return Err(RuleViolation::NoTransfer);
        }
        if action.kind == ActionKind::ReduceGradients && action.micro_batch > 0 {
            let given = action.micro_batch;
            return Err(RuleViolation::MicroBatchOfReduction { given });
        }
        let operations = operations(action);
        for operation in &operations {
            if let Some((action, position)) = self.done.get(operation).copied() {
                return Err(RuleViolation::Repeated { action, position });
            }
        }
        for needs in self.needs(action) {
            if !self.done.contains_key(&needs) {
                return Err(RuleViolation::TooEarly { needs });
            }
        }
        for operation in operations {
            self.done.insert(operation, (*action, position));
        }
        Ok(())
    }

    /// Returns the operations on the same rank that an action depends on.
    fn needs(&self, action: &Action) -> Vec<Action> {
        let stage = action.stage;
        let own = |kind| Action { kind, ..*action };
        match action.kind {
            ActionKind::Forward | ActionKind::PairedForward => {
                let below = stage.checked_sub(1);
                let input = self.arrival(action, ActionKind::ReceiveActivation, below);
                input.into_iter().collect()
            }
            ActionKind::Backward | ActionKind::InputGradient => {
                let above = Some(stage + 1).filter(|above| *above < self.schedule.stages());
                let gradient = self.arrival(action, ActionKind::ReceiveGradient, above);
                let forward = own(ActionKind::Forward);
                [forward].into_iter().chain(gradient).collect()
            }
            ActionKind::WeightGradient | ActionKind::SendGradient => {
                vec![own(ActionKind::InputGradient)]
            }
            ActionKind::SendActivation => vec![own(ActionKind::Forward)],
            ActionKind::ReceiveActivation | ActionKind::ReceiveGradient => vec![],
            // A later forward could use any parameter of the stage again.
            ActionKind::ReduceGradients => (0..self.schedule.micro_batches())
                .map(|micro_batch| Action::new(ActionKind::Forward, stage, micro_batch))
                .collect(),
        }
    }

    /// Returns the operation that supplies the result of an adjacent stage: a receive, or an operation on the
    /// same rank.
    fn arrival(
        &self,
        action: &Action,
        receive: ActionKind,
        adjacent: Option<usize>,
    ) -> Option<Action> {
        let adjacent = adjacent?;
        if self.schedule.transfer(receive, action).is_none() {
            let here = match receive {
                ActionKind::ReceiveActivation => ActionKind::Forward,
                _ => ActionKind::InputGradient,
            };
            return Some(Action::new(here, adjacent, action.micro_batch));
        }
        let received = Action {
            kind: receive,
            ..*action
        };
        self.required.transfers.then_some(received)
    }

    /// Returns the first missing action of a rank, by micro-batch and stage. Reductions come last, by stage.
    fn missing(&self, rank: usize) -> Option<Action> {
        let stages = self.schedule.stages_of(rank);
        let required: Vec<_> = ActionKind::ALL
            .iter()
            .copied()
            .filter(|kind| !matches!(kind, ActionKind::Backward | ActionKind::PairedForward))
            .filter(|kind| kind.is_compute() || self.required.transfers && kind.is_transfer())
            .collect();
        for micro_batch in 0..self.schedule.micro_batches() {
            for stage in &stages {
                for kind in &required {
                    let action = Action::new(*kind, *stage, micro_batch);
                    let due = kind.is_compute() || self.schedule.peer(&action).is_some();
                    if due && !self.is_done(&action) {
                        return Some(self.or_full_backward(action));
                    }
                }
            }
        }
        let reductions = stages.into_iter().map(Action::reduce_gradients);
        reductions
            .filter(|_| self.required.reductions)
            .find(|reduction| !self.is_done(reduction))
    }

    /// Whether an action that consists of a single operation is done.
    fn is_done(&self, action: &Action) -> bool {
        self.done.contains_key(action)
    }

    /// Returns a full backward if neither half of the backward is done. Otherwise returns `missing`.
    fn or_full_backward(&self, missing: Action) -> Action {
        let weight = Action {
            kind: ActionKind::WeightGradient,
            ..missing
        };
        let kind = match missing.kind {
            ActionKind::InputGradient if !self.is_done(&weight) => ActionKind::Backward,
            kind => kind,
        };
        Action { kind, ..missing }
    }
}

/// Simulates ranks whose sends block until the matching receive, until all lists end or the ranks deadlock.
fn check_deadlock(schedule: &Schedule) -> Result<(), InvalidSchedule> {
    let mut next = vec![0; schedule.ranks()];
    let mut ready: Vec<usize> = (0..schedule.ranks()).collect();
    while let Some(rank) = ready.pop() {
        while let Some(action) = schedule.ranks[rank].get(next[rank]) {
            if let Some((peer, counterpart)) = schedule.matching_transfer(action) {
                if schedule.ranks[peer].get(next[peer]) != Some(&counterpart) {
                    break;
                }
                next[peer] += 1;
                ready.push(peer);
            }
            next[rank] += 1;
        }
    }
    let blocked = (0..schedule.ranks()).find(|rank| next[*rank] < schedule.ranks[*rank].len());
    match blocked {
        Some(rank) => Err(deadlock(schedule, &next, rank)),
        None => Ok(()),
    }
}

/// Returns the cycle that a blocked rank waits in. No rank waits for a rank that has finished its list.
fn deadlock(schedule: &Schedule, next: &[usize], blocked: usize) -> InvalidSchedule {
    let at = |rank: usize| schedule.ranks[rank][next[rank]];
    let mut cycle = wait_cycle(blocked, |rank| {
        schedule
            .matching_transfer(&at(rank))
            .expect("only transfers wait")
            .0
    });
    let lowest = (0..cycle.len()).min_by_key(|i| cycle[*i]).unwrap_or(0);
    cycle.rotate_left(lowest);
    let rank = cycle[0];
    InvalidSchedule {
        rank,
        position: next[rank],
        actions: schedule.ranks[rank].len(),
        action: at(rank),
        reason: RuleViolation::Deadlock {
            cycle: cycle.into_iter().map(|rank| (rank, at(rank))).collect(),
        },
    }
}

/// Counts the live activations of a schedule whose lists are valid.
pub(super) fn activation_report(schedule: &Schedule) -> ActivationReport {
    let peaks = |frees: fn(ActionKind) -> bool| -> Vec<usize> {
        schedule
            .ranks
            .iter()
            .map(|list| peak(list, frees))
            .collect()
    };
    ActivationReport {
        peak_activations: peaks(frees_activations),
        peak_until_input_gradient: peaks(ActionKind::computes_input_gradient),
    }
}

/// Whether this kind of action frees all activations of a micro-batch in its stage.
fn frees_activations(kind: ActionKind) -> bool {
    matches!(kind, ActionKind::Backward | ActionKind::WeightGradient)
}

impl Schedule {
    /// Returns, for each stage, the maximum number of micro-batches whose forward has run and whose backward has not
    /// run.
    pub fn in_flight(&self) -> Vec<usize> {
        let of_stage = |stage: usize| {
            let actions = self.actions(self.rank_of(stage)).iter();
            let own = actions.filter(|action| action.stage == stage);
            peak(own, frees_activations)
        };
        (0..self.stages()).map(of_stage).collect()
    }
}

/// Returns the maximum number of forwards in the list whose activations are live at once.
fn peak<'a>(list: impl IntoIterator<Item = &'a Action>, frees: fn(ActionKind) -> bool) -> usize {
    let (mut live, mut peak) = (0, 0);
    for action in list {
        if action.kind.is_forward() {
            live += 1;
            peak = peak.max(live);
        } else if frees(action.kind) {
            live -= 1;
        }
    }
    peak
}
