//! How long a schedule takes, and how much of that its ranks wait.

use std::collections::{HashMap, HashSet};

use super::validate::report;
use super::{Action, ActionKind, Schedule, ScheduleError, validate};

/// The times of the parts of each stage, all in one unit; a full backward pass takes the sum of its
/// input gradient and its weight gradient.
#[derive(Clone, Debug, PartialEq)]
pub struct Times {
    /// For each stage, the time of a forward pass.
    pub forward: Vec<f64>,
    /// For each stage, the time of an input gradient.
    pub input_gradient: Vec<f64>,
    /// For each stage, the time of a weight gradient.
    pub weight_gradient: Vec<f64>,
    /// For each stage, the time until what it sends has arrived.
    pub transfer: Vec<f64>,
}

impl Times {
    /// The same times for all of `stages` stages.
    pub fn uniform(
        stages: usize,
        forward: f64,
        input_gradient: f64,
        weight_gradient: f64,
        transfer: f64,
    ) -> Self {
        Times {
            forward: vec![forward; stages],
            input_gradient: vec![input_gradient; stages],
            weight_gradient: vec![weight_gradient; stages],
            transfer: vec![transfer; stages],
        }
    }

    /// How long an action takes. A receive takes none by itself; it waits.
    fn of(&self, action: &Action) -> f64 {
        let stage = action.stage;
        match action.kind {
            ActionKind::Forward => self.forward[stage],
            ActionKind::Backward => self.input_gradient[stage] + self.weight_gradient[stage],
            ActionKind::InputGradient => self.input_gradient[stage],
            ActionKind::WeightGradient => self.weight_gradient[stage],
            ActionKind::SendActivation | ActionKind::SendGradient => self.transfer[stage],
            ActionKind::ReceiveActivation | ActionKind::ReceiveGradient => 0.0,
        }
    }

    fn check(&self, stages: usize) -> Result<(), ScheduleError> {
        let all = [
            ("forward", &self.forward),
            ("input gradient", &self.input_gradient),
            ("weight gradient", &self.weight_gradient),
            ("transfer", &self.transfer),
        ];
        for (what, times) in all {
            if times.len() != stages {
                return Err(ScheduleError::TimesCount {
                    what,
                    given: times.len(),
                    stages,
                });
            }
            let wrong = |time: &f64| !time.is_finite() || *time < 0.0;
            if let Some(stage) = times.iter().position(wrong) {
                let time = times[stage];
                return Err(ScheduleError::Time { what, stage, time });
            }
        }
        Ok(())
    }
}

/// An action and when it happens.
///
/// A computation lasts as long as it computes. A send lasts until what it sends has arrived, while
/// its rank goes on. So does a receive: from when its rank comes to it until it has arrived.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// The action.
    pub action: Action,
    /// When it begins, the schedule beginning at 0.
    pub start: f64,
    /// When it is done.
    pub end: f64,
}

/// A schedule played through with given times. Fractions of a time of 0 are 0.
#[derive(Clone, Debug, PartialEq)]
pub struct Simulation {
    schedule: Schedule,
    /// For each rank, its stages.
    stages: Vec<Vec<usize>>,
    timelines: Vec<Vec<Span>>,
    total: f64,
    busy: Vec<f64>,
    peak_activations: Vec<usize>,
}

impl Simulation {
    /// The schedule that was played through.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// What a rank does and when, in order.
    ///
    /// # Panics
    ///
    /// Where there is no such rank.
    #[track_caller]
    pub fn timeline(&self, rank: usize) -> &[Span] {
        &self.timelines[rank]
    }

    /// The time from 0 until the last computation is done.
    pub fn total(&self) -> f64 {
        self.total
    }

    /// The time that a rank computes.
    ///
    /// # Panics
    ///
    /// Where there is no such rank.
    #[track_caller]
    pub fn busy(&self, rank: usize) -> f64 {
        self.busy[rank]
    }

    /// The part of the total in which a rank does not compute, from 0 to 1.
    ///
    /// # Panics
    ///
    /// Where there is no such rank.
    #[track_caller]
    pub fn rank_bubble(&self, rank: usize) -> f64 {
        idle_part(self.busy[rank], self.total)
    }

    /// The part of the ranks' time in which they do not compute, from 0 to 1.
    pub fn bubble(&self) -> f64 {
        idle_part(
            self.busy.iter().sum(),
            self.total * self.schedule.ranks() as f64,
        )
    }

    /// The time in which a rank does not compute between its first computation and its last.
    ///
    /// Papers that let every rank begin its next step without waiting for the others call only this
    /// a bubble.
    ///
    /// # Panics
    ///
    /// Where there is no such rank.
    #[track_caller]
    pub fn idle_inside(&self, rank: usize) -> f64 {
        let computed = || {
            self.timelines[rank]
                .iter()
                .filter(|span| span.action.kind.is_compute())
        };
        match (computed().next(), computed().next_back()) {
            (Some(first), Some(last)) => last.end - first.start - self.busy[rank],
            _ => 0.0,
        }
    }

    /// For each rank, the most stage-activations that live at once, as in
    /// [`Report::peak_activations`](super::Report::peak_activations).
    pub fn peak_activations(&self) -> &[usize] {
        &self.peak_activations
    }

    pub(super) fn stages_of(&self, rank: usize) -> &[usize] {
        &self.stages[rank]
    }

    pub(super) fn all_timelines(&self) -> impl Iterator<Item = &[Span]> {
        self.timelines.iter().map(Vec::as_slice)
    }

    /// The kinds of actions that take time.
    pub(super) fn kinds(&self) -> HashSet<ActionKind> {
        self.timelines
            .iter()
            .flatten()
            .filter(|span| span.end > span.start)
            .map(|span| span.action.kind)
            .collect()
    }
}

/// The part of `total` that is not `busy`, from 0 to 1; 0 of nothing.
pub(in super::super) fn idle_part(busy: f64, total: f64) -> f64 {
    if total > 0.0 {
        ((total - busy) / total).max(0.0)
    } else {
        0.0
    }
}

/// Plays a schedule through.
///
/// Sends and receives take their ranks no time: what a rank sends leaves at the end of its last
/// computation, and a computation waits only for what it needs itself.
///
/// # Errors
///
/// [`ScheduleError::Invalid`], [`ScheduleError::TimesCount`] and [`ScheduleError::Time`].
pub fn simulate(schedule: &Schedule, times: &Times) -> Result<Simulation, ScheduleError> {
    validate(schedule)?;
    times.check(schedule.stages())?;
    let mut player = Player {
        schedule,
        times,
        clocks: vec![0.0; schedule.ranks()],
        timelines: vec![vec![]; schedule.ranks()],
        arrivals: HashMap::new(),
    };
    let mut ready: Vec<usize> = (0..schedule.ranks()).collect();
    while let Some(rank) = ready.pop() {
        ready.extend(player.advance(rank));
    }
    player.end_receives();
    Ok(Simulation {
        schedule: schedule.clone(),
        stages: (0..schedule.ranks())
            .map(|rank| schedule.stages_of(rank))
            .collect(),
        total: player.clocks.iter().copied().fold(0.0, f64::max),
        busy: player.timelines.iter().map(|line| busy(line)).collect(),
        timelines: player.timelines,
        peak_activations: report(schedule).peak_activations,
    })
}

fn busy(timeline: &[Span]) -> f64 {
    timeline
        .iter()
        .filter(|span| span.action.kind.is_compute())
        .map(|span| span.end - span.start)
        .sum()
}

struct Player<'a> {
    schedule: &'a Schedule,
    times: &'a Times,
    /// The end of each rank's last computation.
    clocks: Vec<f64>,
    timelines: Vec<Vec<Span>>,
    /// By receive, when it has arrived.
    arrivals: HashMap<Action, f64>,
}

impl Player<'_> {
    /// Lets a rank go on as far as it can; the ranks for which it sent something are returned.
    fn advance(&mut self, rank: usize) -> Vec<usize> {
        let mut reached = vec![];
        while let Some(action) = self.schedule.ranks[rank].get(self.timelines[rank].len()) {
            let now = self.clocks[rank];
            let mut start = now;
            if let Some(receive) = self.schedule.needs(action) {
                let Some(arrival) = self.arrivals.get(&receive) else {
                    break;
                };
                start = now.max(*arrival);
            }
            let end = start + self.times.of(action);
            if action.kind.is_compute() {
                self.clocks[rank] = end;
            }
            if action.kind.is_send()
                && let Some((peer, receive)) = self.schedule.other_end(action)
            {
                self.arrivals.insert(receive, end);
                reached.push(peer);
            }
            self.timelines[rank].push(Span {
                action: *action,
                start,
                end,
            });
        }
        reached
    }

    /// Lets the receives last until what they receive has arrived.
    fn end_receives(&mut self) {
        for span in self.timelines.iter_mut().flatten() {
            if let Some(arrival) = self.arrivals.get(&span.action) {
                span.end = span.start.max(*arrival);
            }
        }
    }
}
