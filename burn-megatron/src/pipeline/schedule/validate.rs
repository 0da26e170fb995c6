//! The rules of a schedule, and the first action that breaks one.

use std::collections::HashMap;
use std::fmt;

use super::ring::ring;
use super::{Action, ActionKind, Schedule};

/// What a valid schedule needs of its ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// For each rank, the most stage-activations that live at once. One of them is what one stage
    /// keeps of one micro-batch from its forward pass until its backward pass, or until its weight
    /// gradient where that stands apart.
    pub peak_activations: Vec<usize>,
    /// The same, but counted only until the input gradient: what lives where a weight gradient
    /// needs little of what the forward pass kept.
    pub peak_until_input_gradient: Vec<usize>,
}

/// The first action that breaks a rule, and the rule.
///
/// First is what stands earliest in its list, and on the lowest rank among equals; ranks that wait
/// for one another are looked for only where each list is right by itself.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Invalid {
    /// The rank in whose list the rule is broken.
    pub rank: usize,
    /// The index in that list; its length where something is missing at its end.
    pub position: usize,
    /// The length of that list.
    pub actions: usize,
    /// The wrong or missing action.
    pub action: Action,
    /// What is wrong with it.
    pub reason: Reason,
}

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Invalid {
            rank,
            position,
            actions,
            action,
            reason,
        } = self;
        let words = action.describe();
        if *reason == Reason::Missing {
            return write!(
                f,
                "rank {rank} ends after {actions} actions without \"{action}\" ({words})"
            );
        }
        let nth = position + 1;
        write!(
            f,
            "rank {rank}, action {nth} of {actions}, \"{action}\" ({words}): {reason}"
        )
    }
}

/// Why an action is wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// There is no such stage or micro-batch.
    #[error("there are {stages} stages and {micro_batches} micro-batches, both counted from 0")]
    Outside {
        /// Stages of the schedule.
        stages: usize,
        /// Micro-batches of the schedule.
        micro_batches: usize,
    },
    /// The stage belongs to another rank.
    #[error("the stage is on rank {owner}")]
    WrongRank {
        /// The rank that holds the stage.
        owner: usize,
    },
    /// There is nothing to send or to receive.
    #[error("this passes between no two ranks, so that nothing is sent or received")]
    NoTransfer,
    /// The same was done before.
    #[error("\"{action}\" has done this already, as action {} of the rank", position + 1)]
    Repeated {
        /// The earlier action.
        action: Action,
        /// Its index in the list.
        position: usize,
    },
    /// Something comes later or never on which the action depends.
    #[error("it needs \"{needs}\" ({}), which is not done before", needs.describe())]
    TooEarly {
        /// What has to be done first, on the same rank.
        needs: Action,
    },
    /// The rank does not do it at all.
    #[error("the rank never does it")]
    Missing,
    /// Ranks wait for one another.
    #[error("{}", ring_text(ring))]
    Deadlock {
        /// The ranks, and what each waits in for the next one; the last waits for the first.
        ring: Vec<(usize, Action)>,
    },
}

/// `rank 0 waits in "SF 0 1" for rank 1, which waits in "SB 1 0" for rank 0`.
fn ring_text(ring: &[(usize, Action)]) -> String {
    let waits: Vec<_> = (0..ring.len())
        .map(|i| {
            let (action, next) = (ring[i].1, ring[(i + 1) % ring.len()].0);
            format!("waits in \"{action}\" for rank {next}")
        })
        .collect();
    let first = ring.first().map_or(0, |(rank, _)| *rank);
    format!("rank {first} {}", waits.join(", which "))
}

/// Checks every rule of the [module](super), and counts what lives.
///
/// # Errors
///
/// [`Invalid`] names the first wrong action.
pub fn validate(schedule: &Schedule) -> Result<Report, Invalid> {
    let wrong = (0..schedule.ranks())
        .filter_map(|rank| check_alone(schedule, rank, true).err())
        .min_by_key(|invalid| (invalid.position, invalid.rank));
    match wrong {
        Some(invalid) => Err(invalid),
        None => check_together(schedule).map(|()| report(schedule)),
    }
}

/// What is done once for each stage and micro-batch, whichever action does it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Deed {
    Forward,
    InputGradient,
    WeightGradient,
    Transfer(ActionKind),
}

impl Deed {
    fn all_of(kind: ActionKind) -> &'static [Deed] {
        match kind {
            ActionKind::Forward => &[Deed::Forward],
            ActionKind::Backward => &[Deed::InputGradient, Deed::WeightGradient],
            ActionKind::InputGradient => &[Deed::InputGradient],
            ActionKind::WeightGradient => &[Deed::WeightGradient],
            ActionKind::SendActivation => &[Deed::Transfer(ActionKind::SendActivation)],
            ActionKind::ReceiveActivation => &[Deed::Transfer(ActionKind::ReceiveActivation)],
            ActionKind::SendGradient => &[Deed::Transfer(ActionKind::SendGradient)],
            ActionKind::ReceiveGradient => &[Deed::Transfer(ActionKind::ReceiveGradient)],
        }
    }

    /// The action that a message names where the deed is not done.
    fn action(self, stage: usize, micro_batch: usize) -> Action {
        let kind = match self {
            Deed::Forward => ActionKind::Forward,
            Deed::InputGradient => ActionKind::InputGradient,
            Deed::WeightGradient => ActionKind::WeightGradient,
            Deed::Transfer(kind) => kind,
        };
        Action::new(kind, stage, micro_batch)
    }
}

/// Checks one rank's list by itself, its sends and receives only with `transfers`.
///
/// With transfers, all that a rank depends on is in its own list, so that lists that are right by
/// themselves can only fail by waiting for one another.
pub(super) fn check_alone(
    schedule: &Schedule,
    rank: usize,
    transfers: bool,
) -> Result<(), Invalid> {
    let list = &schedule.ranks[rank];
    let mut checker = Checker {
        schedule,
        transfers,
        done: HashMap::new(),
    };
    let invalid = |position, action, reason| Invalid {
        rank,
        position,
        actions: list.len(),
        action,
        reason,
    };
    for (position, action) in list.iter().enumerate() {
        checker
            .step(rank, position, action)
            .map_err(|reason| invalid(position, *action, reason))?;
    }
    match checker.missing(rank) {
        Some(action) => Err(invalid(list.len(), action, Reason::Missing)),
        None => Ok(()),
    }
}

struct Checker<'a> {
    schedule: &'a Schedule,
    transfers: bool,
    /// By stage and micro-batch, the action that did it and its position.
    done: HashMap<(Deed, usize, usize), (Action, usize)>,
}

impl Checker<'_> {
    fn step(&mut self, rank: usize, position: usize, action: &Action) -> Result<(), Reason> {
        let (stages, micro_batches) = (self.schedule.stages(), self.schedule.micro_batches());
        if action.stage >= stages || action.micro_batch >= micro_batches {
            return Err(Reason::Outside {
                stages,
                micro_batches,
            });
        }
        let owner = self.schedule.rank_of(action.stage);
        if owner != rank {
            return Err(Reason::WrongRank { owner });
        }
        if !action.kind.is_compute() && self.schedule.peer(action).is_none() {
            return Err(Reason::NoTransfer);
        }
        let deeds = Deed::all_of(action.kind);
        for deed in deeds {
            let done = self.done.get(&(*deed, action.stage, action.micro_batch));
            if let Some((action, position)) = done.copied() {
                return Err(Reason::Repeated { action, position });
            }
        }
        for (deed, stage) in self.needs(action) {
            if !self.done.contains_key(&(deed, stage, action.micro_batch)) {
                let needs = deed.action(stage, action.micro_batch);
                return Err(Reason::TooEarly { needs });
            }
        }
        for deed in deeds {
            let key = (*deed, action.stage, action.micro_batch);
            self.done.insert(key, (*action, position));
        }
        Ok(())
    }

    /// What has to be done before, on the same rank and for the same micro-batch.
    fn needs(&self, action: &Action) -> Vec<(Deed, usize)> {
        let stage = action.stage;
        match action.kind {
            ActionKind::Forward => {
                let below = stage.checked_sub(1);
                let input = self.arrival(action, ActionKind::ReceiveActivation, below);
                input.into_iter().collect()
            }
            ActionKind::Backward | ActionKind::InputGradient => {
                let above = Some(stage + 1).filter(|above| *above < self.schedule.stages());
                let gradient = self.arrival(action, ActionKind::ReceiveGradient, above);
                [(Deed::Forward, stage)]
                    .into_iter()
                    .chain(gradient)
                    .collect()
            }
            ActionKind::WeightGradient | ActionKind::SendGradient => {
                vec![(Deed::InputGradient, stage)]
            }
            ActionKind::SendActivation => vec![(Deed::Forward, stage)],
            ActionKind::ReceiveActivation | ActionKind::ReceiveGradient => vec![],
        }
    }

    /// How a stage gets what its neighbour computes: by a receive, or from the rank itself.
    fn arrival(
        &self,
        action: &Action,
        receive: ActionKind,
        neighbour: Option<usize>,
    ) -> Option<(Deed, usize)> {
        let neighbour = neighbour?;
        if self.schedule.transfer(receive, action).is_none() {
            let here = match receive {
                ActionKind::ReceiveActivation => Deed::Forward,
                _ => Deed::InputGradient,
            };
            return Some((here, neighbour));
        }
        self.transfers
            .then_some((Deed::Transfer(receive), action.stage))
    }

    /// The first thing that the rank should do and does not, by micro-batch and stage.
    fn missing(&self, rank: usize) -> Option<Action> {
        let stages = self.schedule.stages_of(rank);
        let wanted = ActionKind::ALL
            .into_iter()
            .filter(|kind| *kind != ActionKind::Backward)
            .filter(|kind| self.transfers || kind.is_compute());
        let wanted: Vec<_> = wanted.collect();
        for micro_batch in 0..self.schedule.micro_batches() {
            for stage in &stages {
                for kind in &wanted {
                    let action = Action::new(*kind, *stage, micro_batch);
                    let due = kind.is_compute() || self.schedule.peer(&action).is_some();
                    if due && !self.is_done(&action) {
                        return Some(self.whole(action));
                    }
                }
            }
        }
        None
    }

    fn is_done(&self, action: &Action) -> bool {
        let deed = Deed::all_of(action.kind)[0];
        self.done
            .contains_key(&(deed, action.stage, action.micro_batch))
    }

    /// A backward pass where neither half of it is done.
    fn whole(&self, missing: Action) -> Action {
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

/// Follows ranks whose sends wait for the matching receive, until all are at their end.
fn check_together(schedule: &Schedule) -> Result<(), Invalid> {
    let mut next = vec![0; schedule.ranks()];
    let mut ready: Vec<usize> = (0..schedule.ranks()).collect();
    while let Some(rank) = ready.pop() {
        while let Some(action) = schedule.ranks[rank].get(next[rank]) {
            if let Some((peer, counterpart)) = schedule.other_end(action) {
                if schedule.ranks[peer].get(next[peer]) != Some(&counterpart) {
                    break;
                }
                next[peer] += 1;
                ready.push(peer);
            }
            next[rank] += 1;
        }
    }
    let stuck = (0..schedule.ranks()).find(|rank| next[*rank] < schedule.ranks[*rank].len());
    match stuck {
        Some(rank) => Err(deadlock(schedule, &next, rank)),
        None => Ok(()),
    }
}

/// The ring in which a stuck rank waits. A rank at its end has sent and received all that it
/// should, so that no rank waits for it.
fn deadlock(schedule: &Schedule, next: &[usize], stuck: usize) -> Invalid {
    let at = |rank: usize| schedule.ranks[rank][next[rank]];
    let mut ring = ring(stuck, |rank| {
        schedule.other_end(&at(rank)).expect("only messages wait").0
    });
    let lowest = (0..ring.len()).min_by_key(|i| ring[*i]).unwrap_or(0);
    ring.rotate_left(lowest);
    let rank = ring[0];
    Invalid {
        rank,
        position: next[rank],
        actions: schedule.ranks[rank].len(),
        action: at(rank),
        reason: Reason::Deadlock {
            ring: ring.into_iter().map(|rank| (rank, at(rank))).collect(),
        },
    }
}

/// Counts the live activations of a schedule whose lists are right.
pub(super) fn report(schedule: &Schedule) -> Report {
    let peaks = |frees: fn(ActionKind) -> bool| -> Vec<usize> {
        schedule
            .ranks
            .iter()
            .map(|list| peak(list, frees))
            .collect()
    };
    Report {
        peak_activations: peaks(|kind| {
            matches!(kind, ActionKind::Backward | ActionKind::WeightGradient)
        }),
        peak_until_input_gradient: peaks(ActionKind::gives_input_gradient),
    }
}

fn peak(list: &[Action], frees: fn(ActionKind) -> bool) -> usize {
    let (mut live, mut peak) = (0, 0);
    for action in list {
        if action.kind == ActionKind::Forward {
            live += 1;
            peak = peak.max(live);
        } else if frees(action.kind) {
            live -= 1;
        }
    }
    peak
}
