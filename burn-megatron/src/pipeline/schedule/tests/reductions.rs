//! Positions of reductions, and schedules with an invalid reduction.

use insta::assert_snapshot;

use super::super::{Action, ActionKind, Schedule, ScheduleKind, StageTimes, simulate, validate};
use super::{INTERLEAVED, interleaved, schedule};

/// Returns the index of the reduction of a stage in the list of its rank.
fn position(schedule: &Schedule, stage: usize) -> usize {
    let actions = schedule.actions(schedule.rank_of(stage)).iter();
    let mut positions = actions
        .enumerate()
        .filter(|(_, action)| **action == Action::reduce_gradients(stage));
    let (position, _) = positions.next().expect("one");
    assert_eq!(positions.next(), None);
    position
}

#[test]
fn a_stage_is_reduced_after_its_last_forward() {
    for kind in ScheduleKind::ALL {
        if kind == INTERLEAVED {
            continue;
        }
        for (p, m) in [(1, 1), (1, 4), (2, 3), (4, 8), (4, 3)] {
            let schedule = schedule(kind, p, m);
            for stage in 0..schedule.stages() {
                let position = position(&schedule, stage);
                let actions = schedule.actions(schedule.rank_of(stage));
                let last = actions[position - 1];
                assert_eq!((last.kind, last.stage), (ActionKind::Forward, stage));
                let is_own = |a: &&Action| a.stage == stage && a.kind == ActionKind::Forward;
                assert_eq!(actions[..position].iter().filter(is_own).count(), m);
            }
        }
    }
}

/// The ranks start together in simulated time, with a backward twice as long as a forward.
#[test]
fn ranks_of_an_interleaved_schedule_start_together() {
    for (p, v, m, group) in [(4, 2, 8, 4), (4, 3, 8, 4), (3, 4, 9, 3), (2, 2, 5, 3)] {
        let schedule = interleaved(p, v, m, group);
        let times = StageTimes::uniform(schedule.stages(), 1.0, 1.0, 1.0, 0.0);
        let simulation = simulate(&schedule, &times).expect("valid");
        let start = |stage| {
            let timeline = simulation.timeline(schedule.rank_of(stage));
            let span = timeline[position(&schedule, stage)];
            assert_eq!(span.start, span.end);
            span.start
        };
        // The first stage of each rank is reduced at the end of the step.
        for chunk in 1..v {
            let starts: Vec<f64> = (0..p).map(|rank| start(chunk * p + rank)).collect();
            assert!(starts.iter().all(|one| *one == starts[0]), "{starts:?}");
        }
        for rank in 0..p {
            let last = schedule
                .actions(rank)
                .iter()
                .rposition(|a| a.kind.is_compute());
            assert_eq!(position(&schedule, rank), last.expect("one") + 1);
        }
    }
}

#[test]
fn the_reductions_of_an_interleaved_schedule_row_by_row() {
    assert_eq!(
        schedule(INTERLEAVED, 2, 2).to_csv(),
        "F 0 0,SF 0 0,F 0 1,SF 0 1,RF 2 0,F 2 0,RF 2 1,SF 2 0,F 2 1,SF 2 1,RB 2 0,B 2 0,SB 2 0,RB 2 1,\
         B 2 1,RG 2,RB 0 0,SB 2 1,B 0 0,RB 0 1,B 0 1,RG 0\n\
         RF 1 0,F 1 0,RF 1 1,SF 1 0,F 1 1,SF 1 1,RF 3 0,F 3 0,B 3 0,RF 3 1,SB 3 0,F 3 1,B 3 1,RB 1 0,\
         SB 3 1,B 1 0,RG 3,SB 1 0,RB 1 1,B 1 1,RG 1,SB 1 1\n"
    );
}

/// Returns the first invalid action of a schedule after a change of one of its lists.
fn message(change: impl Fn(&mut Vec<Vec<Action>>)) -> String {
    let mut schedule = schedule(ScheduleKind::OneFOneB, 2, 2);
    change(&mut schedule.ranks);
    let refusal = validate(&schedule).expect_err("changed").to_string();
    // The simulator also refuses it.
    let times = StageTimes::uniform(2, 1.0, 1.0, 1.0, 0.0);
    let error = simulate(&schedule, &times).expect_err("changed");
    assert_eq!(error.to_string(), refusal);
    refusal
}

#[test]
fn a_wrong_reduction_is_refused() {
    let reduction = Action::reduce_gradients;
    assert_snapshot!(
        message(|ranks| ranks[1].retain(|action| *action != reduction(1))),
        @"rank 1 ends after 8 actions without \"RG 1\" (reducing the gradients of stage 1)"
    );
    assert_snapshot!(
        message(|ranks| ranks[0].push(reduction(0))),
        @"rank 0, action 10 of 10, \"RG 0\" (reducing the gradients of stage 0): already done by \
          \"RG 0\", action 4 of the rank"
    );
    assert_snapshot!(
        message(|ranks| ranks[0].swap(2, 3)),
        @"rank 0, action 3 of 9, \"RG 0\" (reducing the gradients of stage 0): it needs \"F 0 1\" \
          (forward of stage 0, micro-batch 1) before it"
    );
    assert_snapshot!(
        message(|ranks| ranks[0][3] = reduction(1)),
        @"rank 0, action 4 of 9, \"RG 1\" (reducing the gradients of stage 1): the stage is on rank 1"
    );
    assert_snapshot!(
        message(|ranks| ranks[0][3] = reduction(2)),
        @"rank 0, action 4 of 9, \"RG 2\" (reducing the gradients of stage 2): out of range for 2 \
          stages and 2 micro-batches, both counted from 0"
    );
    assert_snapshot!(
        message(|ranks| ranks[0][3].micro_batch = 1),
        @"rank 0, action 4 of 9, \"RG 0\" (reducing the gradients of stage 0): a reduction has no \
          micro-batch: expected micro_batch 0, got 1"
    );
}

/// Any position after the last forward is valid.
#[test]
fn a_reduction_may_be_late() {
    let mut schedule = schedule(ScheduleKind::ZbH1, 2, 4);
    for list in &mut schedule.ranks {
        let first = list
            .iter()
            .position(|action| action.kind == ActionKind::ReduceGradients)
            .expect("one");
        for at in first + 1..list.len() {
            list.swap(at - 1, at);
        }
        assert_eq!(
            list.last().map(|last| last.kind),
            Some(ActionKind::ReduceGradients)
        );
    }
    validate(&schedule).expect("valid");
}

#[test]
fn a_table_without_reductions_gets_them_after_the_last_forwards() {
    let computations = "F 0 0,F 0 1,B 0 0,B 0 1\nF 1 0,B 1 0,F 1 1,B 1 1";
    let expected = schedule(ScheduleKind::OneFOneB, 2, 2);
    let read = Schedule::from_csv("1f1b", computations).expect("valid");
    assert_eq!(read, expected);
    // An earlier version wrote schedules in this form.
    let transfers = expected.to_csv().replace("RG 0,", "").replace("RG 1,", "");
    assert!(!transfers.contains("RG"));
    let read = Schedule::from_csv("1f1b", &transfers).expect("valid");
    assert_eq!(read, expected);
    // An error counts the actions of the table.
    let early = transfers.replace("RF 1 0,F 1 0,B 1 0,", "F 1 0,B 1 0,RF 1 0,");
    let message = Schedule::from_csv("1f1b", &early)
        .expect_err("early")
        .to_string();
    assert!(
        message.starts_with("rank 1, action 1 of 8, \"F 1 0\""),
        "{message}"
    );
}

#[test]
fn a_table_with_some_reductions_must_have_all() {
    let missing = "without \"RG 1\" (reducing the gradients of stage 1)";
    let computations = "F 0 0,RG 0,B 0 0\nF 1 0,B 1 0";
    let error = Schedule::from_csv("some", computations).expect_err("one");
    assert_eq!(
        error.to_string(),
        format!("rank 1 ends after 2 actions {missing}")
    );
    let transfers = "F 0 0,RG 0,SF 0 0,RB 0 0,B 0 0\nRF 1 0,F 1 0,B 1 0,SB 1 0";
    let schedule = Schedule::from_csv("some", transfers).expect("read, not checked");
    let error = validate(&schedule).expect_err("one");
    assert_eq!(
        error.to_string(),
        format!("rank 1 ends after 4 actions {missing}")
    );
}
