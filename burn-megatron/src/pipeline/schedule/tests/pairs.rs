//! Tests of pairs: a forward and the backward of another micro-batch that run together.

use super::super::{
    ActionKind, Schedule, ScheduleConfig, ScheduleError, ScheduleKind, StageTimes, generate,
    simulate, validate,
};

/// Returns 1F1B with pairs.
fn paired(ranks: usize, micro_batches: usize) -> Schedule {
    let config = ScheduleConfig::new(ScheduleKind::OneFOneB, ranks, micro_batches);
    generate(&config.with_pairs(true)).expect("valid")
}

/// Returns 1F1B with pairs, with this number of forwards before the first pair of each rank.
fn with_warm_up(ranks: usize, micro_batches: usize, warm_up: impl Fn(usize) -> usize) -> Schedule {
    let row = |rank: usize| {
        let warm_up = warm_up(ranks - rank - 1).min(micro_batches);
        let first = (0..warm_up).map(|i| format!("F {rank} {i}"));
        let pairs =
            (warm_up..micro_batches).map(|i| format!("FB {rank} {i} {rank} {}", i - warm_up));
        let last = (micro_batches - warm_up..micro_batches).map(|i| format!("B {rank} {i}"));
        first.chain(pairs).chain(last).collect::<Vec<_>>().join(",")
    };
    let rows: Vec<_> = (0..ranks).map(row).collect();
    Schedule::from_csv("pairs", &rows.join("\n")).expect("valid")
}

fn total(schedule: &Schedule) -> f64 {
    let times = StageTimes::uniform(schedule.stages(), 1.0, 1.0, 1.0, 0.0);
    simulate(schedule, &times).expect("valid").total()
}

/// A forward takes 1, and a backward takes 2. Results of a pair are sent when both computations are done, so the next
/// rank receives them one pair later. If the warm-up has one more forward than in eager 1F1B, no rank waits. If it has
/// one more forward than in 1F1B, all ranks wait.
#[test]
fn pairs_need_a_longer_warm_up() {
    assert_eq!(total(&paired(4, 16)), 57.0);
    assert_eq!(total(&with_warm_up(4, 16, |below| below + 1)), 99.0);
}

/// Pairs cost no time in addition to the bubble of the kind, for all sizes.
#[test]
fn paired_schedules_are_valid() {
    for (kind, most) in [
        (ScheduleKind::OneFOneB, 0.0),
        (ScheduleKind::Interleaved { group: None }, 0.5),
        (ScheduleKind::DualPipeV, 0.5),
    ] {
        for (ranks, micro_batches) in [(1, 2), (1, 7), (2, 8), (3, 12), (4, 8), (4, 16), (8, 32)] {
            let config = ScheduleConfig::new(kind, ranks, micro_batches).with_pairs(true);
            let plain = generate(&config.with_pairs(false)).expect("valid");
            let schedule = match generate(&config) {
                Ok(schedule) => schedule,
                // There are too few micro-batches for the kind, and the error reports it.
                Err(ScheduleError::NoPair { fits, .. }) => {
                    assert!(micro_batches < fits, "{kind}, {ranks}, {micro_batches}");
                    let config = ScheduleConfig {
                        micro_batches: fits,
                        ..config
                    };
                    generate(&config).expect("a pair")
                }
                Err(error) => panic!("{kind}, {ranks}, {micro_batches}: {error}"),
            };
            assert!(schedule.has_pairs());
            validate(&schedule).expect("valid");
            if schedule.micro_batches() == micro_batches && micro_batches >= 2 * ranks {
                let more = total(&schedule) - total(&plain);
                assert!(
                    more <= most * 3.0 * ranks as f64,
                    "{kind}, {ranks}: {more} more"
                );
            }
            let read = Schedule::from_csv(schedule.name(), &schedule.to_csv()).expect("written");
            assert_eq!(read, schedule);
        }
    }
}

#[test]
fn a_kind_or_a_batch_without_pairs_is_refused() {
    for kind in ScheduleKind::ALL {
        let config = ScheduleConfig::new(kind, 2, 8).with_pairs(true);
        let message = generate(&config).err().map(|error| error.to_string());
        let expected = (!kind.has_pairs()).then(|| {
            format!("{kind} has no pairs of a forward and a backward: use 1f1b, interleaved or dualpipe-v")
        });
        assert_eq!(message, expected);
    }
    let config = ScheduleConfig::new(ScheduleKind::OneFOneB, 1, 1).with_pairs(true);
    insta::assert_snapshot!(
        generate(&config).expect_err("one micro-batch"),
        @"1f1b on 1 pipeline ranks has no pairs of a forward and a backward in steps of 1 micro-batches: use at least \
          2 micro-batches for each data rank"
    );
}

#[test]
fn a_pair_is_one_cell_with_its_transfers_around_it() {
    let schedule = paired(2, 3);
    let text = schedule.to_csv();
    let rows: Vec<&str> = text.lines().collect();
    assert!(rows[1].contains("FB 1 1 1 0"), "{text}");
    for rank in 0..2 {
        let list = schedule.actions(rank);
        let pairs = list.windows(2);
        let pairs = pairs.filter(|two| two[0].kind == ActionKind::PairedForward);
        for two in pairs {
            assert_eq!(two[1].kind, ActionKind::Backward, "{text}");
        }
    }
    let read = Schedule::from_csv("1f1b", &text).expect("written by the schedule");
    assert_eq!(read, schedule);
    let report = validate(&read).expect("valid");
    // The peak of a rank is the number of its warm-up forwards plus one, for the forward of a pair.
    assert_eq!(report.peak_activations, [3, 2]);
}

/// The timeline shows the two computations one after the other, and nothing is sent before both have ended.
#[test]
fn results_of_a_pair_leave_together() {
    let schedule = paired(2, 4);
    let times = StageTimes::uniform(2, 1.0, 1.0, 1.0, 0.5);
    let simulation = simulate(&schedule, &times).expect("valid");
    let spans = simulation.timeline(1);
    let at = |kind, micro_batch| {
        let found = spans
            .iter()
            .find(|span| span.action.kind == kind && span.action.micro_batch == micro_batch);
        *found.expect("it runs")
    };
    let (forward, backward) = (
        at(ActionKind::PairedForward, 1),
        at(ActionKind::Backward, 0),
    );
    assert_eq!(
        (forward.end - forward.start, backward.end - backward.start),
        (1.0, 2.0)
    );
    assert_eq!(forward.end, backward.start);
    assert_eq!(at(ActionKind::SendGradient, 0).start, backward.end);
    let sent = simulation.timeline(0).iter();
    let sent = sent.filter(|span| span.action.kind == ActionKind::SendActivation);
    let ends: Vec<_> = simulation
        .timeline(0)
        .iter()
        .filter(|span| span.action.kind.is_compute())
        .map(|span| span.end)
        .collect();
    for send in sent {
        assert!(ends.contains(&send.start));
    }
    let busy: f64 = 4.0 * 3.0;
    assert_eq!([simulation.busy(0), simulation.busy(1)], [busy; 2]);
}

#[test]
fn a_pair_is_of_two_micro_batches_and_nothing_between() {
    let refused = |text: &str| match Schedule::from_csv("own", text) {
        Ok(schedule) => validate(&schedule).expect_err("refused").to_string(),
        Err(ScheduleError::Invalid(invalid)) => invalid.to_string(),
        Err(error) => error.to_string(),
    };
    let message = refused("F 0 0,FB 0 1 0 1,B 0 0");
    assert!(
        message.contains("expected a backward of another micro-batch"),
        "{message}"
    );
    for text in [
        "F 0 0,FB 0 1,B 0 0",
        "FB 0 1 0",
        "FB 0 1 0 x",
        "FB 0 1 0 1 2",
    ] {
        let message = refused(text);
        assert!(
            message.contains("as in \"FB 2 5 2 3\""),
            "{text}: {message}"
        );
    }
    // The backward needs its own forward before the pair.
    let message = refused("FB 0 0 0 1,F 0 1,B 0 0");
    assert!(message.contains("it needs \"F 0 1\""), "{message}");
}
