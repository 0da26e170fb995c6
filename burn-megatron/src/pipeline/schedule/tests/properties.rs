//! Random schedules and random faults: compares the validator with a checker that shares no code with it.

use std::collections::{BTreeSet, HashMap};

use proptest::prelude::*;
use proptest::sample::Index;

use super::super::validate::activation_report;
use super::super::{Action, ActionKind, RuleViolation, Schedule, ScheduleConfig, ScheduleKind};
use super::super::{StageTimes, generate, simulate, validate};
use super::checker::is_valid;
use super::{INTERLEAVED, computations, dataflow, interleaved, schedule};

/// Asserts that the validator and the checker agree, and that an error names an existing action.
fn agree(schedule: &Schedule) -> Result<bool, TestCaseError> {
    let right = is_valid(schedule);
    match validate(schedule) {
        Ok(found) => {
            prop_assert!(right, "accepted, but wrong:\n{}", schedule.to_csv());
            let times = StageTimes::uniform(schedule.stages(), 1.0, 1.0, 1.0, 0.5);
            let simulation = simulate(schedule, &times).expect("valid");
            prop_assert_eq!(simulation.peak_activations(), &found.peak_activations);
            prop_assert!(found == activation_report(schedule));
        }
        Err(invalid) => {
            prop_assert!(
                !right,
                "refused, but right: {invalid}\n{}",
                schedule.to_csv()
            );
            let list = schedule.actions(invalid.rank);
            prop_assert_eq!(invalid.actions, list.len());
            match invalid.reason {
                RuleViolation::Missing => {
                    prop_assert_eq!(invalid.position, list.len());
                    prop_assert!(!list.contains(&invalid.action));
                }
                _ => prop_assert_eq!(list.get(invalid.position), Some(&invalid.action)),
            }
        }
    }
    Ok(right)
}

/// A change of one list.
#[derive(Clone, Debug)]
enum Fault {
    Swap(Index, Index),
    SwapNeighbours(Index),
    Delete(Index),
    Duplicate(Index, Index),
    Move(Index, Index),
    MoveToRank(Index, Index, Index),
    Alter(Index, Index, usize, usize),
    Halve(Index, Index),
}

fn fault() -> impl Strategy<Value = Fault> {
    let at = any::<Index>;
    prop_oneof![
        (at(), at()).prop_map(|(a, b)| Fault::Swap(a, b)),
        at().prop_map(Fault::SwapNeighbours),
        at().prop_map(Fault::Delete),
        (at(), at()).prop_map(|(a, b)| Fault::Duplicate(a, b)),
        (at(), at()).prop_map(|(a, b)| Fault::Move(a, b)),
        (at(), at(), at()).prop_map(|(a, b, c)| Fault::MoveToRank(a, b, c)),
        (at(), at(), 0..9_usize, 0..9_usize).prop_map(|(a, b, c, d)| Fault::Alter(a, b, c, d)),
        (at(), at()).prop_map(|(a, b)| Fault::Halve(a, b)),
    ]
}

fn apply(fault: &Fault, schedule: &mut Schedule, rank: usize) {
    let ranks = schedule.ranks.len();
    let list = &mut schedule.ranks[rank];
    if list.is_empty() {
        return;
    }
    let n = list.len();
    match fault {
        Fault::Swap(a, b) => list.swap(a.index(n), b.index(n)),
        Fault::SwapNeighbours(a) => {
            let a = a.index(n);
            list.swap(a, (a + 1).min(n - 1));
        }
        Fault::Delete(a) => {
            list.remove(a.index(n));
        }
        Fault::Duplicate(a, to) => list.insert(to.index(n + 1), list[a.index(n)]),
        Fault::Move(a, to) => {
            let action = list.remove(a.index(n));
            list.insert(to.index(n), action);
        }
        Fault::MoveToRank(a, other, to) => {
            let action = list.remove(a.index(n));
            let other = &mut schedule.ranks[other.index(ranks)];
            other.insert(to.index(other.len() + 1), action);
        }
        Fault::Alter(a, kind, stage, micro_batch) => {
            let kind = ActionKind::ALL[kind.index(ActionKind::ALL.len())];
            list[a.index(n)] = Action::new(kind, *stage, *micro_batch);
        }
        Fault::Halve(a, to) => halve(list, a.index(n), to),
    }
}

/// Replaces a backward by an input gradient, and inserts its weight gradient anywhere.
fn halve(list: &mut Vec<Action>, at: usize, to: &Index) {
    let Some(at) = (at..list.len()).find(|i| list[*i].kind == ActionKind::Backward) else {
        return;
    };
    list[at].kind = ActionKind::InputGradient;
    let weight = Action {
        kind: ActionKind::WeightGradient,
        ..list[at]
    };
    list.insert(to.index(list.len() + 1), weight);
}

fn valid_schedule() -> impl Strategy<Value = Schedule> {
    let kinds = prop::sample::select(ScheduleKind::ALL.to_vec());
    let sizes = (kinds, 1..5_usize, 1..7_usize, any::<bool>());
    sizes.prop_filter_map("does not run", |(kind, p, m, pairs)| {
        let schedule = generate(&ScheduleConfig::new(kind, p, m)).ok()?;
        if pairs {
            paired(schedule)
        } else {
            Some(schedule)
        }
    })
}

/// Returns the schedule in which each forward is paired with a later backward of another micro-batch, or `None`
/// if ranks would wait for each other.
fn paired(mut schedule: Schedule) -> Option<Schedule> {
    for list in &mut schedule.ranks {
        list.retain(|action| action.kind.is_compute());
        for i in 1..list.len() {
            let [forward, backward] = [list[i - 1], list[i]];
            if forward.kind == ActionKind::Forward
                && backward.kind == ActionKind::Backward
                && forward.micro_batch != backward.micro_batch
            {
                list[i - 1].kind = ActionKind::PairedForward;
            }
        }
    }
    let schedule = schedule.with_communication().ok()?;
    Some(schedule.with_reduce_gradients())
}

/// Any order of computations and reductions that respects dependencies, on random ranks.
fn random_order() -> impl Strategy<Value = Schedule> {
    let sizes = (1..5_usize, 1..7_usize, 1..5_usize, any::<bool>());
    let choices = prop::collection::vec(any::<Index>(), 6 * 4 * 3 + 2 * 6);
    (sizes, choices).prop_map(|((ranks, stages, m, split), choices)| {
        let mut choices = choices.into_iter();
        let mut choose = |n: usize| choices.next().map_or(0, |index| index.index(n));
        let placement: Vec<_> = (0..stages).map(|_| choose(ranks)).collect();
        let mut lists = vec![vec![]; ranks];
        let mut done = BTreeSet::new();
        loop {
            let free = free_computations(stages, m, split, &done);
            if free.is_empty() {
                break;
            }
            let action = free[choose(free.len())];
            done.insert(action);
            lists[placement[action.stage]].push(action);
        }
        for (stage, rank) in placement.iter().enumerate() {
            let list = &mut lists[*rank];
            let is_own = |one: &Action| one.stage == stage && one.kind == ActionKind::Forward;
            let last = list.iter().rposition(is_own).expect("each stage has one");
            let at = last + 1 + choose(list.len() - last);
            list.insert(at, Action::reduce_gradients(stage));
        }
        let schedule = Schedule::new("random", placement, m, lists).expect("shaped");
        schedule.with_communication().expect("in order")
    })
}

/// Returns the computations that are not done but whose dependencies are done.
fn free_computations(stages: usize, m: usize, split: bool, done: &BTreeSet<Action>) -> Vec<Action> {
    let backward = if split {
        ActionKind::InputGradient
    } else {
        ActionKind::Backward
    };
    let mut free = vec![];
    for micro_batch in 0..m {
        for stage in 0..stages {
            let at = |kind, stage| Action::new(kind, stage, micro_batch);
            let is_done = |kind, stage| done.contains(&at(kind, stage));
            let forward = stage == 0 || is_done(ActionKind::Forward, stage - 1);
            let last = stage + 1 == stages;
            let gradient =
                is_done(ActionKind::Forward, stage) && (last || is_done(backward, stage + 1));
            let weight = split && is_done(backward, stage);
            for (kind, ready) in [
                (ActionKind::Forward, forward),
                (backward, gradient),
                (ActionKind::WeightGradient, weight),
            ] {
                if ready && !is_done(kind, stage) {
                    free.push(at(kind, stage));
                }
            }
        }
    }
    free
}

/// Returns the total if ranks block in each receive, in the order of the list, but not in sends.
fn in_order(schedule: &Schedule) -> f64 {
    let mut clocks = vec![0.0_f64; schedule.ranks()];
    let mut next = vec![0; schedule.ranks()];
    let mut sent: HashMap<Action, f64> = HashMap::new();
    let mut moved = true;
    while moved {
        moved = false;
        for rank in 0..schedule.ranks() {
            while let Some(action) = schedule.actions(rank).get(next[rank]) {
                if action.kind.is_receive() {
                    let send = action.counterpart().expect("a receive");
                    let Some(time) = sent.get(&send) else { break };
                    clocks[rank] = clocks[rank].max(*time);
                } else if action.kind.is_send() {
                    sent.insert(*action, clocks[rank]);
                } else if action.kind.is_compute() {
                    let double = action.kind == ActionKind::Backward;
                    clocks[rank] += if double { 2.0 } else { 1.0 };
                }
                next[rank] += 1;
                moved = true;
            }
        }
    }
    clocks.into_iter().fold(0.0, f64::max)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn faults_are_found_where_they_are_faults(
        mut schedule in valid_schedule(),
        faults in prop::collection::vec((fault(), any::<Index>()), 1..4),
    ) {
        for (fault, rank) in &faults {
            let rank = rank.index(schedule.ranks());
            apply(fault, &mut schedule, rank);
        }
        agree(&schedule)?;
    }

    #[test]
    fn faults_in_random_orders_too(
        mut schedule in random_order(),
        faults in prop::collection::vec((fault(), any::<Index>()), 1..3),
    ) {
        for (fault, rank) in &faults {
            let rank = rank.index(schedule.ranks());
            apply(fault, &mut schedule, rank);
        }
        agree(&schedule)?;
    }

    #[test]
    fn any_order_gets_sends_and_receives_that_cost_nothing(schedule in random_order()) {
        prop_assert!(agree(&schedule)?, "{}", schedule.to_csv());
        let times = StageTimes::uniform(schedule.stages(), 1.0, 1.0, 1.0, 0.0);
        let total = simulate(&schedule, &times).expect("valid").total();
        prop_assert_eq!(total, dataflow(&schedule, &times));
        prop_assert_eq!(total, in_order(&schedule), "{}", schedule.to_csv());
        for rank in 0..schedule.ranks() {
            let actions = schedule.actions(rank);
            for (i, action) in actions.iter().enumerate() {
                if let Some(send) = schedule.send_after(action) {
                    let mut rest = actions[i + 1..].iter();
                    let mut before_next = rest.by_ref().take_while(|one| !one.kind.is_compute());
                    prop_assert!(before_next.any(|one| *one == send), "{send} after {action}");
                }
            }
        }
    }

    #[test]
    fn the_simulator_waits_for_inputs_alone(
        schedule in random_order(),
        times in prop::collection::vec(0..20_u8, 24),
    ) {
        let stages = schedule.stages();
        let part = |first: usize| (0..stages).map(|i| f64::from(times[first + i])).collect();
        let times = StageTimes {
            forward: part(0),
            paired_forward: part(0),
            input_gradient: part(6),
            weight_gradient: part(12),
            transfer: part(18),
        };
        let simulation = simulate(&schedule, &times).expect("valid");
        prop_assert_eq!(simulation.total(), dataflow(&schedule, &times));
        for rank in 0..schedule.ranks() {
            let spans = simulation.timeline(rank);
            prop_assert_eq!(spans.len(), schedule.actions(rank).len());
            let computed: Vec<_> =
                spans.iter().filter(|span| span.action.kind.is_compute()).collect();
            for pair in computed.windows(2) {
                prop_assert!(pair[0].end <= pair[1].start);
            }
        }
    }
}

/// Checks every swap of two adjacent actions, and every removal of an action.
#[test]
fn all_small_faults_of_small_schedules() {
    let (mut right, mut wrong) = (0, 0);
    for kind in ScheduleKind::ALL {
        for (p, m) in [(2, 2), (3, 3), (2, 4)] {
            let schedule = schedule(kind, p, m);
            for rank in 0..p {
                for i in 0..schedule.actions(rank).len() {
                    let mut without = schedule.clone();
                    without.ranks[rank].remove(i);
                    assert!(!agree(&without).expect("agrees"));
                    if i > 0 {
                        let mut swapped = schedule.clone();
                        swapped.ranks[rank].swap(i - 1, i);
                        if agree(&swapped).expect("agrees") {
                            right += 1
                        } else {
                            wrong += 1
                        }
                    }
                }
            }
        }
    }
    assert!(right > 100 && wrong > 100, "{right} right, {wrong} wrong");
}

#[test]
fn every_generated_schedule_is_valid() {
    for p in 1..6 {
        for m in 1..12 {
            for kind in ScheduleKind::ALL {
                if let Ok(schedule) = generate(&ScheduleConfig::new(kind, p, m)) {
                    assert!(agree(&schedule).expect("agrees"), "{kind} {p} {m}");
                    assert_eq!(schedule.micro_batches(), m);
                } else {
                    assert_eq!(kind, INTERLEAVED);
                }
            }
        }
    }
}

#[test]
fn every_accepted_group_is_valid_and_at_the_closed_form() {
    let mut count = 0;
    for p in 1..5 {
        for (v, m) in [(2, 1), (2, 4), (3, 4), (2, 7), (3, 8), (2, 11)] {
            for group in 1..=m {
                let kind = ScheduleKind::Interleaved { group: Some(group) };
                let config = ScheduleConfig::new(kind, p, m).with_virtual_stages(v);
                if generate(&config).is_err() {
                    continue;
                }
                count += 1;
                let schedule = interleaved(p, v, m, group);
                assert!(agree(&schedule).expect("agrees"), "{p} {v} {m} {group}");
                let times = StageTimes::uniform(schedule.stages(), 1.0, 1.0, 1.0, 0.0);
                let bubble = simulate(&schedule, &times).expect("valid").bubble();
                let form = (p - 1) as f64 / (v * m + p - 1) as f64;
                assert!(
                    (bubble - form).abs() < 1e-12,
                    "{p} {v} {m} {group}: {bubble}"
                );
            }
        }
    }
    assert!(count > 50, "{count}");
}

/// Every stage runs forwards, backwards and weight gradients in the order of the micro-batches, so that
/// gradients are summed in the same order under every schedule.
#[test]
fn every_schedule_adds_up_in_the_same_order() {
    for kind in ScheduleKind::ALL {
        let schedule = schedule(kind, 4, 8);
        for stage in 0..schedule.stages() {
            let all = computations(&schedule, schedule.rank_of(stage));
            for kind in ActionKind::ALL {
                let of = all
                    .iter()
                    .filter(|one| one.stage == stage && one.kind == *kind);
                let order: Vec<_> = of.map(|one| one.micro_batch).collect();
                // DualPipeV has full and split backwards, and each kind is ordered separately.
                assert!(order.is_sorted(), "{kind:?}");
            }
            let weights = all.iter().filter(|one| {
                let weights = [ActionKind::Backward, ActionKind::WeightGradient];
                one.stage == stage && weights.contains(&one.kind)
            });
            let order: Vec<_> = weights.map(|one| one.micro_batch).collect();
            assert!(order.is_sorted(), "{kind} {stage} {order:?}");
        }
    }
}
