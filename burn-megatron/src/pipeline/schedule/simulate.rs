//! Simulates a schedule with given times and computes its total time and bubble.

use std::collections::HashSet;

use super::validate::activation_report;
use super::{Action, ActionKind, Schedule, ScheduleError, validate};

/// The times of the actions of each stage, all in the same unit. The time of a full backward is the sum of the times of
/// its input gradient and its weight gradient.
#[derive(Clone, Debug, PartialEq)]
pub struct StageTimes {
    /// The time of a forward, for each stage.
    pub forward: Vec<f64>,
    /// The time that a forward adds to the backward with which it is paired, for each stage. This time is less than
    /// `forward` if the forward and the backward overlap.
    pub paired_forward: Vec<f64>,
    /// The time of an input gradient, for each stage.
    pub input_gradient: Vec<f64>,
    /// The time of a weight gradient, for each stage.
    pub weight_gradient: Vec<f64>,
    /// The time to send a tensor to another rank, for each stage that sends tensors.
    pub transfer: Vec<f64>,
}

impl StageTimes {
    /// Creates times that are the same for all stages.
    pub fn uniform(
        stages: usize,
        forward: f64,
        input_gradient: f64,
        weight_gradient: f64,
        transfer: f64,
    ) -> Self {
        StageTimes {
            forward: vec![forward; stages],
            paired_forward: vec![forward; stages],
            input_gradient: vec![input_gradient; stages],
            weight_gradient: vec![weight_gradient; stages],
            transfer: vec![transfer; stages],
        }
    }

    /// Returns the time of an action. It is 0 for a receive, which only waits, and for a reduction, which only
    /// starts.
    fn of(&self, action: &Action) -> f64 {
        let stage = action.stage;
        match action.kind {
            ActionKind::Forward => self.forward[stage],
            ActionKind::PairedForward => self.paired_forward[stage],
            ActionKind::Backward => self.input_gradient[stage] + self.weight_gradient[stage],
            ActionKind::InputGradient => self.input_gradient[stage],
            ActionKind::WeightGradient => self.weight_gradient[stage],
            ActionKind::SendActivation | ActionKind::SendGradient => self.transfer[stage],
            ActionKind::ReceiveActivation
            | ActionKind::ReceiveGradient
            | ActionKind::ReduceGradients => 0.0,
        }
    }

    fn check(&self, stages: usize) -> Result<(), ScheduleError> {
        let all = [
            ("forward", &self.forward),
            ("paired forward", &self.paired_forward),
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

/// An action with its start and end in a simulation. A reduction of gradients has a duration of 0.
///
/// A send lasts until its tensor has arrived. A receive lasts from its position in the list until the tensor has
/// arrived. Sends and receives do not block their ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ActionSpan {
    /// The action.
    pub action: Action,
    /// The start time. The schedule starts at time 0.
    pub start: f64,
    /// The end time.
    pub end: f64,
}

/// The result of a simulation: a schedule with the times of its actions. If the total time is 0, all fractions are 0.
#[derive(Clone, Debug, PartialEq)]
pub struct Simulation {
    schedule: Schedule,
    /// The stages of each rank.
    stages: Vec<Vec<usize>>,
    timelines: Vec<Vec<ActionSpan>>,
    total: f64,
    busy: Vec<f64>,
    peak_activations: Vec<usize>,
}

impl Simulation {
    /// Returns the schedule that was simulated.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// Returns the actions of a rank with their times, in order.
    ///
    /// # Panics
    ///
    /// Panics if the rank is out of range.
    #[track_caller]
    pub fn timeline(&self, rank: usize) -> &[ActionSpan] {
        &self.timelines[rank]
    }

    /// Returns the total time: the time at which the last computation ends.
    pub fn total(&self) -> f64 {
        self.total
    }

    /// Returns the total time of the computations of a rank.
    ///
    /// # Panics
    ///
    /// Panics if the rank is out of range.
    #[track_caller]
    pub fn busy(&self, rank: usize) -> f64 {
        self.busy[rank]
    }

    /// Returns the bubble of a rank: the fraction of the total time in which the rank does not compute, from 0 to 1.
    ///
    /// # Panics
    ///
    /// Panics if the rank is out of range.
    #[track_caller]
    pub fn rank_bubble(&self, rank: usize) -> f64 {
        idle_fraction(self.busy[rank], self.total)
    }

    /// Returns the bubble of the schedule, which is the mean bubble of all ranks: the fraction of the total time in
    /// which a rank does not compute, from 0 to 1.
    pub fn bubble(&self) -> f64 {
        idle_fraction(
            self.busy.iter().sum(),
            self.total * self.schedule.ranks() as f64,
        )
    }

    /// Returns, for each rank, the peak number of stage activations in memory: see
    /// [`ActivationReport::peak_activations`](super::ActivationReport::peak_activations).
    pub fn peak_activations(&self) -> &[usize] {
        &self.peak_activations
    }

    /// Returns the stages that a rank holds.
    pub fn stages_of(&self, rank: usize) -> &[usize] {
        &self.stages[rank]
    }

    /// Returns the actions of each rank with their times, in the order of the ranks.
    pub fn all_timelines(&self) -> impl Iterator<Item = &[ActionSpan]> {
        self.timelines.iter().map(Vec::as_slice)
    }

    /// Returns the kinds of the actions that take time in this simulation.
    pub fn kinds(&self) -> HashSet<ActionKind> {
        self.timelines
            .iter()
            .flatten()
            .filter(|span| span.end > span.start)
            .map(|span| span.action.kind)
            .collect()
    }
}

/// Returns the fraction of `total` that is not `busy`, from 0 to 1. It is 0 if `total` is 0.
pub(in super::super) fn idle_fraction(busy: f64, total: f64) -> f64 {
    if total > 0.0 {
        ((total - busy) / total).max(0.0)
    } else {
        0.0
    }
}

/// Simulates a schedule with the given times of its actions.
///
/// Sends and receives do not block their ranks. A tensor is sent at the end of its computation, and a computation only
/// waits for its own inputs. A pair waits for the inputs of both of its computations and takes the sum of their times.
/// In the timeline, one computation of a pair follows the other. Reductions of gradients take no time, because their
/// communication over the data axis overlaps with the computations.
///
/// ```
/// use burn_megatron::pipeline::schedule::{
///     ScheduleConfig, ScheduleKind, StageTimes, generate, simulate, validate,
/// };
///
/// // 1F1B with 2 ranks and 4 micro-batches. A backward takes twice the time of a forward.
/// let schedule = generate(&ScheduleConfig::new(ScheduleKind::OneFOneB, 2, 4))?;
/// assert_eq!(validate(&schedule)?.peak_activations, [2, 1]);
/// let simulation = simulate(&schedule, &StageTimes::uniform(2, 1.0, 1.0, 1.0, 0.0))?;
/// assert_eq!(simulation.total(), 15.0);
/// assert!((simulation.bubble() - 0.2).abs() < 1e-12);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
///
/// [`ScheduleError::Invalid`] for an invalid schedule; [`ScheduleError::TimesCount`] and
/// [`ScheduleError::Time`] for invalid times.
pub fn simulate(schedule: &Schedule, times: &StageTimes) -> Result<Simulation, ScheduleError> {
    validate(schedule)?;
    times.check(schedule.stages())?;
    let mut simulator = Simulator::new(schedule, times);
    simulator.timelines = Some(vec![vec![]; schedule.ranks()]);
    simulator.run();
    simulator.end_receives();
    Ok(Simulation {
        schedule: schedule.clone(),
        stages: (0..schedule.ranks())
            .map(|rank| schedule.stages_of(rank))
            .collect(),
        total: simulator.total(),
        busy: simulator.busy,
        timelines: simulator.timelines.unwrap_or_default(),
        peak_activations: activation_report(schedule).peak_activations,
    })
}

/// Returns the [total time](Simulation::total) of a [generated](super::generate) schedule. This function does not
/// compute timelines, so it is fast enough to compare many schedules.
///
/// # Errors
///
/// [`ScheduleError::TimesCount`] and [`ScheduleError::Time`] for invalid times.
pub fn total_time(schedule: &Schedule, times: &StageTimes) -> Result<f64, ScheduleError> {
    times.check(schedule.stages())?;
    let mut simulator = Simulator::new(schedule, times);
    simulator.run();
    Ok(simulator.total())
}

struct Simulator<'a> {
    schedule: &'a Schedule,
    times: &'a StageTimes,
    /// The end of each rank's last computation.
    clocks: Vec<f64>,
    /// The time in which each rank computes.
    busy: Vec<f64>,
    /// The index of each rank's next action.
    next: Vec<usize>,
    /// The actions of each rank with their times, if timelines are recorded.
    timelines: Option<Vec<Vec<ActionSpan>>>,
    /// The arrival time of each [receive](Self::index); NaN before the tensor is sent.
    arrivals: Vec<f64>,
}

impl<'a> Simulator<'a> {
    fn new(schedule: &'a Schedule, times: &'a StageTimes) -> Self {
        let ranks = schedule.ranks();
        Self {
            schedule,
            times,
            clocks: vec![0.0; ranks],
            busy: vec![0.0; ranks],
            next: vec![0; ranks],
            timelines: None,
            arrivals: vec![f64::NAN; 2 * schedule.stages() * schedule.micro_batches()],
        }
    }

    fn total(&self) -> f64 {
        self.clocks.iter().copied().fold(0.0, f64::max)
    }

    /// Returns the index of a receive in the arrivals.
    fn index(&self, receive: &Action) -> usize {
        let gradient = (receive.kind == ActionKind::ReceiveGradient) as usize;
        let stage = gradient * self.schedule.stages() + receive.stage;
        stage * self.schedule.micro_batches() + receive.micro_batch
    }

    fn run(&mut self) {
        let mut ready: Vec<usize> = (0..self.schedule.ranks()).collect();
        while let Some(rank) = ready.pop() {
            self.advance(rank, &mut ready);
        }
    }

    /// Advances a rank until it waits for an input. The ranks that it has sent to are added to `reached`.
    fn advance(&mut self, rank: usize, reached: &mut Vec<usize>) {
        loop {
            let actions = self.schedule.together(rank, self.next[rank]);
            let receives = actions.iter();
            let receives = receives.filter_map(|action| self.schedule.receive_before(action));
            let mut start = self.clocks[rank];
            let mut is_waiting = actions.is_empty();
            for receive in receives {
                let arrival = self.arrivals[self.index(&receive)];
                is_waiting |= arrival.is_nan();
                start = start.max(arrival);
            }
            if is_waiting {
                break;
            }
            for action in actions {
                start = self.perform(rank, action, start, reached);
            }
            self.next[rank] += actions.len();
        }
    }

    /// Performs one action and returns its end.
    fn perform(
        &mut self,
        rank: usize,
        action: &Action,
        start: f64,
        reached: &mut Vec<usize>,
    ) -> f64 {
        let end = start + self.times.of(action);
        if action.kind.is_compute() {
            self.clocks[rank] = end;
            self.busy[rank] += end - start;
        }
        if action.kind.is_send()
            && let Some((peer, receive)) = self.schedule.matching_transfer(action)
        {
            let index = self.index(&receive);
            self.arrivals[index] = end;
            reached.push(peer);
        }
        if let Some(timelines) = &mut self.timelines {
            timelines[rank].push(ActionSpan {
                action: *action,
                start,
                end,
            });
        }
        end
    }

    /// Sets the end of each receive to its arrival.
    fn end_receives(&mut self) {
        let mut timelines = self.timelines.take().unwrap_or_default();
        for span in timelines.iter_mut().flatten() {
            if span.action.kind.is_receive() {
                let arrival = self.arrivals[self.index(&span.action)];
                span.end = span.start.max(arrival);
            }
        }
        self.timelines = Some(timelines);
    }
}
