//! The positions in a schedule after which the gradients of a stage are reduced.

use std::collections::BTreeMap;

use super::super::schedule::{ActionKind, Schedule};

/// The stages of a rank to close after each position of its list. Once a stage is closed, a gradient is
/// final when no use of its parameter is outstanding, and its reduction over the data axis may start.
///
/// A stage is closed after its last forward. Under an interleaved schedule, rank r finishes the last
/// backward of a chunk r backwards before rank 0, and closes it r backwards later, so that all ranks
/// start the reduction at the same time.
pub(super) fn grad_sync_points(schedule: &Schedule, rank: usize) -> BTreeMap<usize, Vec<usize>> {
    let actions = schedule.actions(rank).iter().enumerate();
    let interleaved = is_interleaved(schedule);
    let counts = |kind: ActionKind| {
        if interleaved {
            matches!(
                kind,
                ActionKind::Backward | ActionKind::InputGradient | ActionKind::WeightGradient
            )
        } else {
            kind == ActionKind::Forward
        }
    };
    let positions: Vec<(usize, usize)> = actions
        .filter(|(_, action)| counts(action.kind))
        .map(|(position, action)| (position, action.stage))
        .collect();
    let wait = if interleaved { rank } else { 0 };
    let mut closes: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for stage in schedule.stages_of(rank) {
        let last = positions.iter().rposition(|(_, other)| *other == stage);
        let Some(last) = last else { continue };
        let at = positions[(last + wait).min(positions.len() - 1)].0;
        closes.entry(at).or_default().push(stage);
    }
    closes
}

/// Several stages per rank, stage s on rank s mod p.
fn is_interleaved(schedule: &Schedule) -> bool {
    let ranks = schedule.ranks();
    schedule.stages() > ranks
        && (0..schedule.stages()).all(|stage| schedule.rank_of(stage) == stage % ranks)
}

#[cfg(test)]
mod tests {
    use super::super::super::schedule::{
        Action, ScheduleConfig, ScheduleKind, StageTimes, generate, simulate,
    };
    use super::*;

    fn schedule(kind: ScheduleKind, ranks: usize, micro_batches: usize) -> Schedule {
        generate(&ScheduleConfig::new(kind, ranks, micro_batches)).unwrap()
    }

    #[test]
    fn a_stage_closes_with_its_last_forward() {
        for kind in [
            ScheduleKind::OneFOneB,
            ScheduleKind::ZbH1,
            ScheduleKind::ZbV,
        ] {
            let schedule = schedule(kind, 4, 8);
            for rank in 0..4 {
                let actions = schedule.actions(rank);
                for (position, stages) in grad_sync_points(&schedule, rank) {
                    for stage in stages {
                        let own = |a: &&Action| a.stage == stage && a.kind == ActionKind::Forward;
                        assert_eq!(actions[..=position].iter().filter(own).count(), 8);
                        assert_eq!(actions[..position].iter().filter(own).count(), 7);
                    }
                }
            }
        }
    }

    /// In simulated time, with a backward twice as long as a forward.
    #[test]
    fn ranks_of_an_interleaved_schedule_start_together() {
        let schedule = schedule(ScheduleKind::Interleaved { group: None }, 4, 8);
        let times = StageTimes::uniform(schedule.stages(), 1.0, 1.0, 1.0, 0.0);
        let simulation = simulate(&schedule, &times).unwrap();
        let begins = |chunk: usize| -> Vec<f64> {
            (0..4)
                .map(|rank| {
                    let stage = chunk * 4 + rank;
                    let ends = grad_sync_points(&schedule, rank);
                    let (position, _) = ends.iter().find(|(_, s)| s.contains(&stage)).unwrap();
                    let action = schedule.actions(rank)[*position];
                    let spans = simulation.timeline(rank).iter();
                    spans
                        .clone()
                        .find(|span| span.action == action)
                        .unwrap()
                        .end
                })
                .collect()
        };
        // The chunk that ends first; the other one ends with the step.
        let first = begins(1);
        assert!(first.iter().all(|begin| *begin == first[0]), "{first:?}");
    }
}
