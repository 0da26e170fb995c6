//! A checker of schedules that shares no code with the validator.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::super::{Action, ActionKind, Schedule};

/// Whether a schedule is valid: it contains every required action exactly once, and has no cycle of
/// dependencies, where a send and its receive are one event.
pub fn is_valid(schedule: &Schedule) -> bool {
    let mut alone = schedule.clone();
    for list in &mut alone.ranks {
        for i in 0..list.len() {
            if list[i].kind == ActionKind::PairedForward {
                let is_pair = list.get(i + 1).is_some_and(|next| {
                    next.kind == ActionKind::Backward && next.micro_batch != list[i].micro_batch
                });
                if !is_pair {
                    return false;
                }
                // Transfers surround a pair, so the order of a pair is the order of its two actions.
                list[i].kind = ActionKind::Forward;
            }
        }
    }
    has_every_action(&alone) && has_no_cycle(&alone)
}

fn has_every_action(schedule: &Schedule) -> bool {
    let mut found: BTreeMap<(usize, usize, usize), BTreeMap<ActionKind, usize>> = BTreeMap::new();
    for rank in 0..schedule.ranks() {
        for action in schedule.actions(rank) {
            let of = found.entry((rank, action.stage, action.micro_batch));
            *of.or_default().entry(action.kind).or_default() += 1;
        }
    }
    let stages = schedule.stages();
    for stage in 0..stages {
        let rank = schedule.rank_of(stage);
        let mut expected = BTreeSet::from([ActionKind::Forward]);
        if stage > 0 && schedule.rank_of(stage - 1) != rank {
            expected.extend([ActionKind::ReceiveActivation, ActionKind::SendGradient]);
        }
        if stage + 1 < stages && schedule.rank_of(stage + 1) != rank {
            expected.extend([ActionKind::SendActivation, ActionKind::ReceiveGradient]);
        }
        let whole = [ActionKind::Backward];
        let halves = [ActionKind::InputGradient, ActionKind::WeightGradient];
        for micro_batch in 0..schedule.micro_batches() {
            // The reduction of the stage is written as an action of micro-batch 0.
            let reduction = (micro_batch == 0).then_some(ActionKind::ReduceGradients);
            let found = found
                .remove(&(rank, stage, micro_batch))
                .unwrap_or_default();
            let once = found.values().all(|count| *count == 1);
            let kinds: BTreeSet<_> = found.into_keys().collect();
            let with = |backward: &[ActionKind]| {
                let backward = backward.iter().copied().chain(reduction);
                kinds == expected.iter().copied().chain(backward).collect()
            };
            if !once || !(with(&whole) || with(&halves)) {
                return false;
            }
        }
    }
    found.is_empty()
}

/// Topological sort of a schedule that has every action.
fn has_no_cycle(schedule: &Schedule) -> bool {
    // A send and its receive are one event, named after the send. Both halves of a backward are separate
    // events.
    let event = |action: &Action| match action.kind {
        ActionKind::ReceiveActivation | ActionKind::ReceiveGradient => {
            action.counterpart().expect("a receive has a send")
        }
        _ => *action,
    };
    let mut waits: HashMap<Action, BTreeSet<Action>> = HashMap::new();
    let mut present = BTreeSet::new();
    for rank in 0..schedule.ranks() {
        let list = schedule.actions(rank);
        present.extend(list.iter().copied());
        for (i, action) in list.iter().enumerate() {
            let before = i.checked_sub(1).map(|i| event(&list[i]));
            waits.entry(event(action)).or_default().extend(before);
        }
    }
    for action in &present {
        let at = |kind, stage| Action::new(kind, stage, action.micro_batch);
        let stage = action.stage;
        let mut needs = vec![];
        match action.kind {
            ActionKind::Forward if stage > 0 => {
                needs.push(at(ActionKind::Forward, stage - 1));
                needs.push(at(ActionKind::SendActivation, stage - 1));
            }
            ActionKind::Backward | ActionKind::InputGradient => {
                needs.push(at(ActionKind::Forward, stage));
                needs.push(at(ActionKind::Backward, stage + 1));
                needs.push(at(ActionKind::InputGradient, stage + 1));
                needs.push(at(ActionKind::SendGradient, stage + 1));
            }
            ActionKind::WeightGradient => needs.push(at(ActionKind::InputGradient, stage)),
            ActionKind::SendActivation => needs.push(at(ActionKind::Forward, stage)),
            ActionKind::SendGradient => {
                needs.push(at(ActionKind::Backward, stage));
                needs.push(at(ActionKind::InputGradient, stage));
            }
            ActionKind::ReduceGradients => {
                let all = 0..schedule.micro_batches();
                needs.extend(all.map(|one| Action::new(ActionKind::Forward, stage, one)));
            }
            _ => {}
        }
        let needs = needs.into_iter().filter(|need| present.contains(need));
        waits.entry(event(action)).or_default().extend(needs);
    }
    let mut left = usize::MAX;
    while waits.len() < left {
        left = waits.len();
        let free: BTreeSet<_> = waits.iter().filter(|(_, needs)| needs.is_empty()).collect();
        let free: BTreeSet<Action> = free.into_iter().map(|(event, _)| *event).collect();
        waits.retain(|event, _| !free.contains(event));
        for needs in waits.values_mut() {
            needs.retain(|need| !free.contains(need));
        }
    }
    waits.is_empty()
}
