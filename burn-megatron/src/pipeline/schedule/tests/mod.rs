//! Tests of schedules: worked examples, closed forms, and properties of random schedules.

mod bubbles;
mod checker;
mod drawing;
mod golden;
mod messages;
mod pairs;
mod properties;
mod reductions;
mod table;

use std::collections::HashMap;

use super::{Action, ActionKind, Schedule, ScheduleConfig, ScheduleKind, StageTimes, generate};

const INTERLEAVED: ScheduleKind = ScheduleKind::Interleaved { group: None };

#[track_caller]
fn schedule(kind: ScheduleKind, ranks: usize, micro_batches: usize) -> Schedule {
    generate(&ScheduleConfig::new(kind, ranks, micro_batches)).expect("runs")
}

#[track_caller]
fn interleaved(ranks: usize, v: usize, micro_batches: usize, group: usize) -> Schedule {
    let kind = ScheduleKind::Interleaved { group: Some(group) };
    let config = ScheduleConfig::new(kind, ranks, micro_batches).with_virtual_stages(v);
    generate(&config).expect("runs")
}

/// Returns the computations of a rank, without its other actions.
fn computations(schedule: &Schedule, rank: usize) -> Vec<Action> {
    let actions = schedule.actions(rank).iter().copied();
    actions.filter(|action| action.kind.is_compute()).collect()
}

/// Returns the total if every computation only waits for its own inputs.
///
/// It shares no code with the simulator, and ignores sends and receives.
fn dataflow(schedule: &Schedule, times: &StageTimes) -> f64 {
    let single = |rank| {
        computations(schedule, rank)
            .into_iter()
            .map(|one| vec![one])
    };
    let units: Vec<Vec<_>> = (0..schedule.ranks())
        .map(|rank| single(rank).collect())
        .collect();
    dataflow_of(schedule, times, &units)
}

/// Returns the total with computations grouped into units. A unit starts when all its inputs are available,
/// takes the sum of its times, and its results are available at its end.
fn dataflow_of(schedule: &Schedule, times: &StageTimes, units: &[Vec<Vec<Action>>]) -> f64 {
    let mut ends: HashMap<(bool, usize, usize), f64> = HashMap::new();
    let mut clocks = vec![0.0_f64; units.len()];
    let mut next = vec![0; units.len()];
    let mut moved = true;
    while moved {
        moved = false;
        for rank in 0..units.len() {
            while let Some(unit) = units[rank].get(next[rank]) {
                let inputs = unit
                    .iter()
                    .map(|one| input(schedule, times, &ends, rank, one));
                let Some(inputs) = inputs.collect::<Option<Vec<f64>>>() else {
                    break;
                };
                let start = inputs.into_iter().fold(clocks[rank], f64::max);
                clocks[rank] = start + unit.iter().map(|one| duration(times, one)).sum::<f64>();
                for one in unit {
                    let forward = one.kind == ActionKind::Forward;
                    if forward || one.kind.computes_input_gradient() {
                        ends.insert((forward, one.stage, one.micro_batch), clocks[rank]);
                    }
                }
                next[rank] += 1;
                moved = true;
            }
        }
    }
    assert!((0..units.len()).all(|rank| next[rank] == units[rank].len()));
    clocks.into_iter().fold(0.0, f64::max)
}

/// Returns the time at which the input of a computation is available, or `None` if it has not been computed.
fn input(
    schedule: &Schedule,
    times: &StageTimes,
    ends: &HashMap<(bool, usize, usize), f64>,
    rank: usize,
    action: &Action,
) -> Option<f64> {
    let forward = action.kind == ActionKind::Forward;
    let from = match forward {
        _ if action.kind == ActionKind::WeightGradient => return Some(0.0),
        true if action.stage == 0 => return Some(0.0),
        true => action.stage - 1,
        false if action.stage + 1 == schedule.stages() => return Some(0.0),
        false => action.stage + 1,
    };
    let away = schedule.rank_of(from) != rank;
    let transfer = if away { times.transfer[from] } else { 0.0 };
    let end = ends.get(&(forward, from, action.micro_batch));
    end.map(|end| end + transfer)
}

fn duration(times: &StageTimes, action: &Action) -> f64 {
    let stage = action.stage;
    let (input, weight) = (times.input_gradient[stage], times.weight_gradient[stage]);
    match action.kind {
        ActionKind::Forward => times.forward[stage],
        ActionKind::Backward => input + weight,
        ActionKind::InputGradient => input,
        ActionKind::WeightGradient => weight,
        kind => panic!("{kind} is no computation"),
    }
}
