//! Tests of the text drawing of a simulation.

use super::super::{ScheduleConfig, ScheduleKind, Simulation, StageTimes, generate, simulate};
use super::{INTERLEAVED, schedule};

fn simulated(config: &ScheduleConfig, time: f64, transfer: f64) -> Simulation {
    let schedule = generate(config).expect("runs");
    let times = StageTimes::uniform(schedule.stages(), time, time, time, transfer);
    simulate(&schedule, &times).expect("valid")
}

#[test]
fn a_small_table() {
    let simulation = simulated(&ScheduleConfig::new(ScheduleKind::OneFOneB, 2, 2), 1.0, 0.0);
    assert_eq!(
        simulation.table(25),
        "   time 0\n\
         r0 F0F1····B0  ··B1\n\
         r1 ··F0B0  F1B1  ····\n\
         F forward, B backward, · waiting\n\
         1f1b: 2 ranks, 2 stages, 2 micro-batches; total 9, bubble 33.3 %, live \
         stage-activations per rank at most 2 1\n"
    );
    let simulation = simulated(&ScheduleConfig::new(ScheduleKind::ZbV, 2, 2), 1.0, 0.0);
    let table = simulation.table(80);
    assert!(
        table.contains("small letters: second stage of a rank"),
        "{table}"
    );
    assert!(
        table.contains("F0") && table.contains("f0") && table.contains("w1"),
        "{table}"
    );
}

/// Four ranks and eight micro-batches fit into one block of 120 columns under every schedule.
#[test]
fn tables_of_a_usual_size_are_not_broken() {
    for kind in ScheduleKind::ALL {
        let config = ScheduleConfig::new(kind, 4, 8);
        let time = 1.0 / config.virtual_stages as f64;
        let table = simulated(&config, time, 0.0).table(120);
        assert_eq!(table.lines().count(), 1 + 4 + 2, "{table}");
        for row in table.lines().take(5) {
            assert!(row.chars().count() <= 120, "{table}");
        }
        for micro_batch in 0..8 {
            let label = format!("F{micro_batch}");
            assert_eq!(table.matches(&label).count(), 4, "{label} in\n{table}");
        }
    }
}

#[test]
fn any_width_and_any_times_can_be_drawn() {
    let config = ScheduleConfig::new(INTERLEAVED, 3, 12).with_virtual_stages(3);
    for columns in [0, 20, 79, 1000, usize::MAX] {
        let table = simulated(&config, 1.0, 0.25).table(columns);
        for row in table.lines().filter(|row| row.starts_with('r')) {
            assert!(row.chars().count() <= columns.max(30), "{table}");
        }
        assert!(table.contains("F11.2"), "{table}");
    }
    let schedule = schedule(ScheduleKind::OneFOneB, 2, 2);
    for (forward, input) in [
        (0.0, 0.0),
        (0.0, 1.0),
        (1e-9, 1.0),
        (1e300, 1.0),
        (1e-300, 1e-300),
    ] {
        let times = StageTimes::uniform(2, forward, input, 0.0, 0.0);
        let simulation = simulate(&schedule, &times).expect("valid");
        let table = simulation.table(100);
        assert!(table.len() < 10_000, "{}", table.len());
    }
}
