//! Compares the simulator with the closed forms of the papers.

use super::super::{Action, ActionKind, Schedule, ScheduleKind, Simulation, StageTimes, simulate};
use super::{INTERLEAVED, computations, dataflow, dataflow_of, interleaved, schedule};

/// The times of a forward, an input gradient and a weight gradient of a stage.
const TIMES: [(f64, f64, f64); 5] = [
    (1.0, 1.0, 1.0),
    (1.0, 1.25, 0.75),
    (1.0, 1.25, 0.5),
    (1.0, 2.0, 1.0),
    (1.0, 0.875, 0.75),
];

#[track_caller]
/// Returns the time in which a rank does not compute between its first and its last computation. Papers in
/// which a rank starts its next step without waiting for the other ranks only count this time as bubble.
fn idle_inside(simulation: &Simulation, rank: usize) -> f64 {
    let spans = simulation.timeline(rank).iter();
    let computed: Vec<_> = spans.filter(|span| span.action.kind.is_compute()).collect();
    match &computed[..] {
        [first, .., last] => last.end - first.start - simulation.busy(rank),
        _ => 0.0,
    }
}

fn simulated(schedule: &Schedule, (f, i, w): (f64, f64, f64)) -> Simulation {
    simulate(
        schedule,
        &StageTimes::uniform(schedule.stages(), f, i, w, 0.0),
    )
    .expect("valid")
}

#[track_caller]
fn close(a: f64, b: f64) {
    assert!((a - b).abs() < 1e-9, "{a} is not {b}");
}

#[test]
fn gpipe_and_1f1b() {
    for times in TIMES {
        for p in 1..9 {
            for m in [1, 2, 3, 8, 13, 32] {
                let expected = (p - 1) as f64 / (m + p - 1) as f64;
                for kind in [
                    ScheduleKind::GPipe,
                    ScheduleKind::OneFOneB,
                    ScheduleKind::EagerOneFOneB,
                ] {
                    let simulation = simulated(&schedule(kind, p, m), times);
                    close(simulation.bubble(), expected);
                }
            }
        }
    }
}

#[test]
fn interleaved_1f1b() {
    for times in TIMES {
        for (p, v, m, group) in [
            (1, 2, 3, 1),
            (2, 2, 5, 3),
            (2, 3, 4, 2),
            (3, 2, 7, 4),
            (4, 2, 8, 4),
            (4, 2, 5, 5),
            (4, 2, 10, 6),
            (4, 2, 10, 10),
            (4, 3, 12, 4),
            (8, 2, 32, 8),
            (8, 4, 32, 8),
        ] {
            let simulation = simulated(&interleaved(p, v, m, group), times);
            let expected = (p - 1) as f64 / (v * m + p - 1) as f64;
            close(simulation.bubble(), expected);
        }
    }
}

/// The quoted numbers: the ideal and the real total with a backward twice as long as a forward, and the bubble
/// in percent.
#[test]
fn the_quoted_table() {
    let one = |p, m| schedule(ScheduleKind::OneFOneB, p, m);
    let rows = [
        (one(8, 32), 117.0, 17.949),
        (interleaved(8, 2, 32, 8), 106.5, 9.859),
        (interleaved(8, 4, 32, 8), 101.25, 5.185),
        (one(4, 8), 33.0, 27.273),
        (interleaved(4, 2, 8, 4), 28.5, 15.789),
        (interleaved(4, 2, 10, 6), 34.5, 13.043),
        (interleaved(4, 2, 10, 10), 34.5, 13.043),
        (interleaved(2, 2, 5, 3), 16.5, 9.091),
        (one(8, 1), 24.0, 87.5),
        (one(8, 8), 45.0, 46.667),
    ];
    for (schedule, total, percent) in rows {
        let v = (schedule.stages() / schedule.ranks()) as f64;
        let simulation = simulated(&schedule, (1.0 / v, 1.0 / v, 1.0 / v));
        close(simulation.total(), total);
        close((100_000.0 * simulation.bubble()).round() / 1000.0, percent);
        let ideal = 3.0 * schedule.micro_batches() as f64;
        close(simulation.busy(0), ideal);
    }
}

/// A forward takes 1, and a backward takes 2. There are four ranks and 16 micro-batches, and a transfer takes 0 or 0.3.
/// In 1F1B each backward waits for two transfers, which a longer warm-up hides.
#[test]
fn transfers_that_a_longer_warm_up_hides() {
    let total = |kind, transfer| {
        let schedule = schedule(kind, 4, 16);
        let times = StageTimes::uniform(4, 1.0, 1.0, 1.0, transfer);
        simulate(&schedule, &times).expect("valid").total()
    };
    let (one, eager) = (ScheduleKind::OneFOneB, ScheduleKind::EagerOneFOneB);
    close(total(one, 0.3), 65.4);
    close(total(eager, 0.3), 58.8);
    close(total(one, 0.0), 57.0);
    close(total(eager, 0.0), 57.0);
}

/// The bubble is (p-1)(F+B-W), where B is the input gradient: Qi et al. 2023, table 1.
#[test]
fn zb_h1() {
    for (f, i, w) in TIMES {
        for (p, m) in [
            (1, 4),
            (2, 4),
            (2, 7),
            (4, 4),
            (4, 8),
            (4, 9),
            (8, 16),
            (8, 32),
        ] {
            let simulation = simulated(&schedule(ScheduleKind::ZbH1, p, m), (f, i, w));
            let idle = (p - 1) as f64 * (f + i - w);
            close(simulation.total() - simulation.busy(0), idle);
        }
    }
}

/// With equal times no rank waits between its first and its last computation: the zero bubble of Qi et al.
/// 2024, with the memory of 1F1B. Rank p-1 starts p-1 forwards late, so the total is longer than the work by
/// this time.
#[test]
fn zb_v() {
    for (p, m) in [
        (1, 2),
        (2, 4),
        (2, 7),
        (3, 6),
        (4, 8),
        (4, 13),
        (8, 16),
        (8, 32),
    ] {
        let simulation = simulated(&schedule(ScheduleKind::ZbV, p, m), (1.0, 1.0, 1.0));
        close(simulation.total(), (6 * m + p - 1) as f64);
        for rank in 0..p {
            close(idle_inside(&simulation, rank), 0.0);
        }
        let bubble = (p - 1) as f64 / (6 * m + p - 1) as f64;
        close(simulation.bubble(), bubble);
    }
}

/// The bubble is (p-1)(F&B+B-3W). B is the full backward, and F&B is a forward overlapped with a backward,
/// whose results are only sent when both are done. This is the table of the DualPipe project, for p ranks with
/// two stages each. The simulator runs the two one after the other, so the result of the forward is sent
/// earlier.
#[test]
fn dualpipe_v() {
    for (p, m) in [
        (1, 2),
        (2, 4),
        (2, 7),
        (3, 6),
        (4, 8),
        (4, 13),
        (8, 16),
        (8, 32),
    ] {
        let schedule = schedule(ScheduleKind::DualPipeV, p, m);
        let units: Vec<_> = (0..p).map(|rank| paired(&schedule, rank)).collect();
        // The formula holds if an input gradient takes at least as long as a forward.
        for (f, i, w) in TIMES.into_iter().filter(|(f, i, _)| i >= f) {
            let simulation = simulated(&schedule, (f, i, w));
            let work = simulation.busy(0);
            let times = StageTimes::uniform(2 * p, f, i, w, 0.0);
            let idle = dataflow_of(&schedule, &times, &units) - work;
            let (backward, both) = (i + w, f + i + w);
            close(idle, (p - 1) as f64 * (both + backward - 3.0 * w));
            assert!(simulation.total() - work < idle + 1e-9);
        }
        let alike = simulated(&schedule, (1.0, 1.0, 1.0));
        close(alike.total() - alike.busy(0), (p - 1) as f64);
    }
}

/// Returns units in which a forward and the backward directly after it are one unit.
fn paired(schedule: &Schedule, rank: usize) -> Vec<Vec<Action>> {
    let mut units: Vec<Vec<Action>> = vec![];
    for action in computations(schedule, rank) {
        match units.last_mut() {
            Some(unit)
                if action.kind == ActionKind::Backward
                    && unit.len() == 1
                    && unit[0].kind == ActionKind::Forward =>
            {
                unit.push(action);
            }
            _ => units.push(vec![action]),
        }
    }
    units
}

/// Compares the simulator with a simulator that shares no code with it, with transfer times.
#[test]
fn a_computation_waits_for_its_own_inputs_alone() {
    let mut all = vec![
        interleaved(4, 2, 10, 6),
        interleaved(4, 3, 9, 5),
        interleaved(8, 4, 16, 8),
    ];
    for kind in ScheduleKind::ALL {
        all.extend([(2, 4), (2, 6), (4, 8), (4, 12), (8, 16)].map(|(p, m)| schedule(kind, p, m)));
    }
    for schedule in all {
        for (f, i, w) in TIMES {
            let times = StageTimes::uniform(schedule.stages(), f, i, w, 0.125);
            let simulation = simulate(&schedule, &times).expect("valid");
            close(simulation.total(), dataflow(&schedule, &times));
        }
    }
}

#[test]
fn transfers_and_stages_of_different_times() {
    let schedule = schedule(ScheduleKind::OneFOneB, 2, 2);
    let times = StageTimes {
        forward: vec![1.0, 2.0],
        paired_forward: vec![1.0, 2.0],
        input_gradient: vec![1.0, 1.5],
        weight_gradient: vec![1.0, 0.5],
        transfer: vec![0.25, 0.5],
    };
    let simulation = simulate(&schedule, &times).expect("valid");
    // F 1 0 from 1.25, B 1 0 from 3.25, F 1 1 from 5.25, B 1 1 from 7.25; B 0 1 from 9.75.
    close(simulation.total(), 11.75);
    close(simulation.busy(0), 6.0);
    close(simulation.busy(1), 8.0);
    close(simulation.rank_bubble(1), 3.75 / 11.75);
    close(simulation.bubble(), 9.5 / 23.5);
    close(idle_inside(&simulation, 1), 0.0);
    close(idle_inside(&simulation, 0), 5.75);
    let sent = &simulation.timeline(0)[1];
    assert_eq!(sent.action.to_string(), "SF 0 0");
    assert_eq!((sent.start, sent.end), (1.0, 1.25));
    let received = &simulation.timeline(1)[0];
    assert_eq!((received.start, received.end), (0.0, 1.25));
}

#[test]
fn no_time_at_all_has_no_bubble() {
    let schedule = schedule(INTERLEAVED, 2, 2);
    let simulation =
        simulate(&schedule, &StageTimes::uniform(4, 0.0, 0.0, 0.0, 0.0)).expect("valid");
    assert_eq!((simulation.total(), simulation.bubble()), (0.0, 0.0));
    assert_eq!(simulation.rank_bubble(0), 0.0);
}
